"""Every setting of `actorq-actor bench`, with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from broker.contract import errors
from broker.program.settings import setting
from edge_actor import config

ENV_PREFIX = "ACTORQ_BENCH_"
PARTS = ("latency", "energy", "control")
KERNELS = ("XNNPACK", "built-in", "numpy")
PRECISIONS = ("float32", "float16", "int8")
QUICK = {
    "widths": (64, 256, 1024),
    "layers": (2,),
    "batches": (1,),
    "threads": (1,),
    "repeats": 1,
    "seconds": 0.2,
    "window_s": 5.0,
    "windows": 2,
    "control_s": 5.0,
}
"""The settings of --quick: minutes become seconds, and figures rougher."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Settings of `actorq-actor bench`.

    Raises:
        ConfigError: Values that cannot be meant, all of them in one message.
    """

    parts: tuple[str, ...] = setting(PARTS, f"what to measure: {', '.join(PARTS)}")
    widths: tuple[int, ...] = setting((64, 128, 256, 512, 1024, 2048, 4096), "of the policies")
    layers: tuple[int, ...] = setting((2, 3), "of the policies, each as wide")
    cnn: bool = setting(True, "a policy with three convolutions on 84x84x4 pixels too")
    precisions: tuple[str, ...] = setting(PRECISIONS, "of the models")
    kernels: tuple[str, ...] = setting(KERNELS, "what runs them; numpy in float32 only")
    batches: tuple[int, ...] = setting((1, 16), "observations at once")
    threads: tuple[int, ...] = setting((1, 0), "of the runtime; 0: as many as there are cores")
    repeats: int = setting(3, "of each figure of latency; its median is told, with the lowest and the highest")
    seconds: float = setting(0.5, "of each figure of latency")
    runtime: str = setting("auto", f"TFLite runtime: {', '.join(config.RUNTIMES)}")
    shapes: tuple[str, ...] = setting(("256x2",), "policies whose energy and control are measured, as WIDTHxLAYERS")
    window_s: float = setting(60.0, "of each window of energy")
    windows: int = setting(5, "of energy, for each precision in turn and for the idle board")
    rates_hz: tuple[float, ...] = setting((50.0, 200.0), "control rates, for energy and control")
    control_s: float = setting(60.0, "how long each control rate is held")
    busy: int = setting(1, "cores that are kept busy by others meanwhile, in the part control")
    meter: str = setting("", "CSV log of an external meter that runs meanwhile; read at the end (docs: power_log.py)")
    meter_offset_s: float = setting(0.0, "added to the times of the meter's log, where its clock is behind")

    def __post_init__(self) -> None:
        problems = []
        for name, allowed in (("parts", PARTS), ("precisions", PRECISIONS), ("kernels", KERNELS)):
            chosen = getattr(self, name)
            problems += [f"{name}: {one!r} is none of {', '.join(allowed)}" for one in chosen if one not in allowed]
        for name in (
            "widths",
            "layers",
            "batches",
            "rates_hz",
            "repeats",
            "seconds",
            "window_s",
            "windows",
            "control_s",
        ):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=1) <= 0:
                problems.append(f"{name} must be above 0, not {value}")
        for name in ("threads", "busy"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=0) < 0:
                problems.append(f"{name} must not be negative: {value}")
        for shape in self.shapes:
            if not all(part.isdecimal() and int(part) for part in shape.split("x", 1)) or "x" not in shape:
                problems.append(f"shapes: {shape!r} is not WIDTHxLAYERS, such as 256x2")
        if self.runtime not in config.RUNTIMES:
            problems.append(f"runtime {self.runtime!r} is none of {', '.join(config.RUNTIMES)}")
        if problems:
            raise errors.ConfigError("\n  ".join(problems), todo="actorq-actor bench --help explains every setting")
