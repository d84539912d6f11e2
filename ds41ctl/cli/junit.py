"""JUnit XML of findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds41ctl.core.finding import Finding, Status


def write(path: Path, suite_name: str, findings: Sequence[Finding]) -> None:
    """Publish one suite: a case a finding; what could not be judged is an error, not a failure."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    from ds41ctl.adapters.files import publish

    suite = TestSuite(suite_name)
    for item in findings:
        case = TestCase(item.id, time=item.seconds or 0.0)
        text = f"expected {item.expected}; found {item.found}"
        if item.status is Status.SKIP:
            case.result = [Skipped(item.summary)]
        elif item.status is Status.UNKNOWN:
            case.result = [Error(f"not judged: {item.summary}")]
        elif item.failed():
            case.result = [Failure(f"{item.summary} ({text})")]
        suite.add_testcase(case)
    document = JUnitXml()
    document.add_testsuite(suite)
    xml: bytes = document.tostring()  # type: ignore[no-untyped-call]
    publish(path.absolute(), [xml])
