"""Long short-term memory (Hochreiter & Schmidhuber 1997; with forget gates, Gers et al. 2000)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.recurrences import Lstm
from kvasir.model.network.attention import RunInputs
from kvasir.model.network.cross_attention import Source
from kvasir.model.network.positions import Positions
from kvasir.model.network.recurrent.mixer import Mixer, State, moving
from kvasir.model.network.run_inputs import PackedInputs


class LstmMixer(Mixer):
    """Cells c = f · c + i · tanh(g), of which o · tanh(c) is shown; i, o, f are sigmoids.

    These and g are linear in the input and in what was shown before. A decoder's layer begins with
    the state that `start` makes of its source's first vector, which an encoder that reads from the
    right computes last. Parameters are in the order of ONNX's operator: [directions, …], the last
    of which is from right to left in an encoder; gates are i, o, f and g.
    """

    def __init__(self, config: TransformerConfig, recurrence: Lstm) -> None:
        super().__init__(config)
        self.width, self.is_encoder = recurrence.width, not config.causal
        n, gates = 1 + recurrence.both_ways, 4 * self.width
        self.weight = nn.Parameter(torch.empty(n, gates, config.d_model))
        self.recurrent = nn.Parameter(torch.empty(n, gates, self.width))
        self.bias = nn.Parameter(torch.zeros(n, 2 * gates))
        for matrix in (self.weight, self.recurrent):
            nn.init.uniform_(matrix, -(self.width**-0.5), self.width**-0.5)
        self.start: nn.Linear | None = None
        if config.encoder is not None:
            self.start = nn.Linear(config.encoder.d_model, 2 * self.width)
        self.output = nn.Linear(n * self.width, config.d_model)

    def forward(self, x: Tensor, positions: Positions, source: Source | None = None) -> Tensor:
        """Run whole sequences; see Mixer."""
        batch, sequence, _ = x.shape
        lengths = torch.full((batch,), sequence, device=x.device)
        if self.is_encoder:
            read = self._read(x, lengths if positions.lengths is None else positions.lengths)
            output: Tensor = self.output(read)
            return output
        state = self.empty_state(x)
        if source is not None and self.start is not None:
            state = self.start(source.hidden[:, 0]).chunk(2, dim=-1)
        return self.mix(x, state, lengths)[0]

    def step(
        self, x: Tensor, positions: Positions, inputs: RunInputs, state: State
    ) -> tuple[Tensor, State]:
        """Run new tokens from a state or, packed, the texts of an encoder; see Mixer."""
        if not isinstance(inputs, PackedInputs):
            return super().step(x, positions, inputs, state)
        read = self._read(functional.embedding(inputs.rows, x), inputs.lengths)
        return self.output(functional.embedding(inputs.places, read.flatten(0, 1))), state

    def mix(self, x: Tensor, state: State, n_new: Tensor) -> tuple[Tensor, State]:
        """See Mixer."""
        if not torch.onnx.is_in_onnx_export():
            shown, after = self._run(x, state, n_new, 0)
        else:
            shown, *last = self._emit(x, n_new.clamp(min=1), "forward", state)
            moves = (n_new > 0)[:, None]
            after = tuple(map(torch.where, (moves, moves), last, state))
        return self.output(shown), after

    def _read(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return what an encoder's layer shows of rows x of `lengths` [batch]."""
        both = len(self.weight) > 1
        if torch.onnx.is_in_onnx_export():
            return self._emit(x, lengths, "bidirectional" if both else "reverse")[0]
        place, empty = torch.arange(x.shape[1], device=x.device), self.empty_state(x)
        turned = (lengths[:, None] - 1 - place).clamp(min=0)[..., None]
        backwards, _ = self._run(x.gather(1, turned.expand_as(x)), empty, lengths, -1)
        parts = [self._run(x, empty, lengths, 0)[0]] if both else []
        return torch.cat((*parts, backwards.gather(1, turned.expand_as(backwards))), dim=-1)

    def _run(self, x: Tensor, state: State, n_new: Tensor, direction: int) -> tuple[Tensor, State]:
        """Return what is shown of each token [batch, sequence, width], and the state."""
        (hidden, cell), shown = state, list[Tensor]()
        bias = self.bias[direction].unflatten(0, (2, -1)).sum(dim=0)
        given, moves = functional.linear(x, self.weight[direction], bias), moving(x, n_new)
        for t in range(x.shape[1]):
            gates = given[:, t] + functional.linear(hidden, self.recurrent[direction])
            i, o, f, g = gates.chunk(4, dim=-1)
            after = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = torch.where(moves[:, t], o.sigmoid() * after.tanh(), hidden)
            cell = torch.where(moves[:, t], after, cell)
            shown.append(hidden)
        return torch.stack(shown, dim=1), (hidden, cell)

    def _emit(
        self, x: Tensor, lengths: Tensor, direction: str, state: State = ()
    ) -> tuple[Tensor, ...]:
        """Emit ONNX's LSTM over rows; return what it shows of each token, and their last state."""
        (batch, sequence, _), n = x.shape, len(self.weight)
        inputs = [x.transpose(0, 1), self.weight, self.recurrent, self.bias, lengths.int()]
        shown, *last = torch.onnx.ops.symbolic_multi_out(
            "LSTM",
            inputs=[*inputs, *(part[None] for part in state)],
            attrs={"hidden_size": self.width, "direction": direction},
            dtypes=(x.dtype,) * 3,
            shapes=([sequence, n, batch, self.width], *[[n, batch, self.width]] * 2),
        )
        return shown.permute(2, 0, 1, 3).flatten(2), *(part[0] for part in last)
