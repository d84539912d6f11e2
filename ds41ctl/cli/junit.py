"""JUnit XML of findings, for build servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds41ctl.adapters.files import publish
from ds41ctl.core.finding import Finding, Status


def write_junit(path: Path, suite_name: str, findings: Sequence[Finding], *, strict: bool = False) -> None:
    """One test case a finding. What could not be judged is an error, or a failure under `strict`."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    suite = TestSuite(suite_name)
    for item in findings:
        case = TestCase(item.id, time=item.seconds or 0.0)
        text = f"expected {item.expected}; found {item.found}"
        if item.status is Status.SKIP:
            case.result = [Skipped(item.summary)]
        elif item.failed(strict=strict):
            case.result = [Failure(f"{item.status}: {item.summary} ({text})")]
        elif item.status is Status.UNKNOWN:
            case.result = [Error(f"not judged: {item.summary}")]
        suite.add_testcase(case)
    document = JUnitXml()
    document.add_testsuite(suite)
    xml: bytes = document.tostring()  # type: ignore[no-untyped-call]
    publish(path.absolute(), [xml])
