"""The doctor's report as text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.sizes import readable


def without_passwords(text: str) -> str:
    """The text with the user and password of its URLs hidden, also where a password holds an @."""
    return re.sub(r"//[^/\s'\"]*@", "//(hidden)@", text)


def render(report: Mapping[str, Any]) -> str:
    """What was looked at, a line or a few each, and the verdict last."""
    return "\n".join((*_lines(report), *_verdict(report)))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    for device in report.get("devices", ()):
        of = device.get("architecture") or f"{device['cores']} cores"
        memory = f"{readable(device['free_memory_bytes'])} free of {readable(device['memory_bytes'])}"
        yield _row("device", f"{device['name']}, {of}, {memory}")
    yield _row("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number))
    missing = [name for name, number in report["versions"].items() if not number]
    if missing:
        yield _row("", f"not installed: {', '.join(missing)}")
    if "communication" in report:
        library = report["communication"]
        yield _row("ranks talk by", f"{library['library']} {library['version'] or ''}".rstrip())
    for name, title in (("attention_backends", "--attention_backend"), ("decoder_attention", "--decoder_attention")):
        if report.get(name):
            yield title
            yield from _backends(report[name])
    if report.get("codecs", {}).get("works"):
        codecs = report["codecs"]
        yield _row("mp4", f"{' + '.join(codecs['written'])} written and read back (ffmpeg {codecs['ffmpeg']})")
    yield from _needs(report)
    for index, (name, value) in enumerate(report["variables"].items()):
        yield _row("" if index else "environment", f"{name}={value}")


def _backends(backends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Usable ones on a line; the others by reason, since most share one."""
    usable = [f"{b['name']} ({b['detail']})" if b.get("detail") else b["name"] for b in backends if b["usable"]]
    yield _row("  usable", ", ".join(usable) or "none")
    by_reason: dict[str, list[str]] = {}
    for backend in backends:
        if not backend["usable"]:
            by_reason.setdefault(backend["reason"], []).append(backend["name"])
    for reason, names in by_reason.items():
        yield _row("  not", f"{', '.join(names)}: {reason}")


def _needs(report: Mapping[str, Any]) -> Iterator[str]:
    if "memory" in report:
        memory = report["memory"]
        items = ", ".join(f"{name} {readable(size)}" for name, size in memory["needed_bytes"].items())
        yield _row("memory", f"a rank needs about {items}; {readable(memory['available_bytes'])} available")
    if "checkpoint" in report:
        checkpoint = report["checkpoint"]
        yield _row("weights", f"{checkpoint['source']}{', in the cache' if checkpoint['cached'] else ''}")
        if "disk" in checkpoint:
            disk = checkpoint["disk"]
            yield _row(
                "", f"{disk['folder']}: needs {readable(disk['needed_bytes'])}, {readable(disk['free_bytes'])} free"
            )
        hub = checkpoint["hub"]
        why = f" ({hub['reason']})" if hub["reason"] else ""
        token = "a token is set" if hub["token"] else "no token is set"
        yield _row("hub", f"{hub['repository']}: access {hub['access']}{why}; {token}")
    if report.get("output"):
        yield _row("output", f"{report['output']['folder']}: {readable(report['output']['free_bytes'])} free")


def _verdict(report: Mapping[str, Any]) -> Iterator[str]:
    run = report.get("run")
    name = ""
    if run is not None:
        name = f": {run['model']}, {run['task']}, {run['width']}x{run['height']}, {run['num_frames']} frames"
        if "device" in run:
            name += f", on {run['device']} in {run['dtype']}, {run['ranks']} rank{'s' if run['ranks'] > 1 else ''}"
    yield ""
    if report["works"]:
        yield f"This run would work here{name}."
        return
    yield f"This run would not work here{name}."
    for problem in report["problems"]:
        yield f"  - {problem}"


def _row(title: str, text: str) -> str:
    return f"{title:<14}{text}"
