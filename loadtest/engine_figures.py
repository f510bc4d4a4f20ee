"""Figures of the engine alone, and of its operators beside stock ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Column, Table


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Figures of steps in which `batch` sequences decode."""

    batch: int
    tokens_per_second: float
    step_milliseconds: float
    read_gigabytes_per_second: float  # of as many bytes as the step's
    roofline: float  # the share of the step that reading its bytes takes
    outside: float  # share of the step outside ONNX Runtime


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The result of `kvasir bench engine`."""

    preset: str
    device: str
    precision: str
    threads: int
    processor: str
    kernels: str | None  # instructions of our own operators; None: stock ones
    versions: dict[str, str]
    decode: list[DecodeFigures]
    prefill_tokens_per_second: dict[int, float]
    outside_greedy: float  # share of the largest step outside ONNX Runtime
    outside_sampled: float
    peak_teraflops: float | None  # of a large bfloat16 product, measured on the GPU
    # Share of that peak by prompt tokens, at two operations a token and weight of the layers: only
    # a prompt's last token meets the head.
    prefill_of_peak: dict[int, float]

    @property
    def speeds(self) -> dict[str, float]:
        """Tokens per second, by what was measured."""
        decode = {f"decode, batch {row.batch}": row.tokens_per_second for row in self.decode}
        prefill = self.prefill_tokens_per_second.items()
        return decode | {f"prefill, {n:,} tokens": speed for n, speed in prefill}

    def heading(self) -> str:
        """Return a line on the model and the machine."""
        machine = "one GPU"
        if self.device == "cpu":
            machine = f"{self.threads} threads of {self.processor}, "
            machine += f"kernels for {self.kernels}" if self.kernels else "stock operators"
        return f"{self.preset}, {self.precision}, {machine}"

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        return asdict(self)

    def tables(self) -> list[str | Table]:
        """Return a line on the machine and three tables for a terminal."""
        decode = [
            {
                "batch": str(row.batch),
                "tokens/s": f"{row.tokens_per_second:,.0f}",
                "step, ms": f"{row.step_milliseconds:.2f}",
                "of batch 1": f"{row.tokens_per_second / self.decode[0].tokens_per_second:.1f} x",
                "GB/s": f"{row.read_gigabytes_per_second:.1f}",
                "of roofline": f"{row.roofline:.0%}",
                "outside the model": f"{row.outside:.1%}",
            }
            for row in self.decode
        ]
        prefill = [
            {"prompt tokens": f"{tokens:,}", "tokens/s": f"{speed:,.0f}"}
            for tokens, speed in self.prefill_tokens_per_second.items()
        ]
        for row, share in zip(prefill, self.prefill_of_peak.values(), strict=False):
            row[f"of {self.peak_teraflops:.0f} TFLOP/s"] = f"{share:.0%}"
        outside = {
            "greedy": f"{self.outside_greedy:.1%}",
            "temperature 0.8, top-p 0.95": f"{self.outside_sampled:.1%}",
        }
        return [
            self.heading(),
            _table("decode", decode),
            _table("prefill", prefill),
            _table(f"batch-{self.decode[-1].batch} step, share outside the model", [outside]),
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `kvasir bench engine --kernels on,off`."""

    kernels: EngineFigures
    stock: EngineFigures

    def as_json(self) -> dict[str, Any]:
        """Return both sets of figures and the ratios, by batch and by prompt tokens."""
        decode = zip(self.kernels.decode, self.stock.decode, strict=True)
        stock = self.stock.prefill_tokens_per_second
        prefill = self.kernels.prefill_tokens_per_second.items()
        return asdict(self) | {
            "decode_ratios": {
                a.batch: a.tokens_per_second / b.tokens_per_second for a, b in decode
            },
            "prefill_ratios": {n: speed / stock[n] for n, speed in prefill},
        }

    def tables(self) -> list[str | Table]:
        """Return a line on the machine and a table for a terminal."""
        stock = self.stock.speeds
        rows = [
            {
                "tokens/s": name,
                "kernels": f"{speed:,.0f}",
                "stock": f"{stock[name]:,.0f}",
                "ratio": f"{speed / stock[name]:.2f}",
            }
            for name, speed in self.kernels.speeds.items()
        ]
        return [self.kernels.heading(), _table("operators of our own and stock ones", rows)]

    def draw(self, out: Path) -> None:
        """Write a PNG: for each figure how many times as fast our operators are."""
        stock = self.stock.speeds
        speeds = self.kernels.speeds
        ratios = {name: speed / stock[name] for name, speed in speeds.items()}
        figure = Figure(figsize=(8, 1.2 + 0.4 * len(ratios)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(ratios), list(ratios.values()), color="#1b4965")
        labels = [
            f"{ratio:.2f}   {speeds[name]:,.0f} / {stock[name]:,.0f} tokens/s"
            for name, ratio in ratios.items()
        ]
        axes.bar_label(bars, labels, padding=4)
        axes.axvline(1.0, color="#e9a23b", label="stock operators")
        axes.set_xlim(0.0, 1.6 * max(ratios.values()))
        axes.invert_yaxis()
        axes.set_xlabel("times as fast as stock operators")
        axes.set_title(self.kernels.heading(), loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, dpi=150)


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(*(Column(name, justify="right") for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*row.values())
    return table
