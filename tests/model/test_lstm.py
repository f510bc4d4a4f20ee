"""LSTM layers: as PyTorch's, in pieces, and as an encoder-decoder that is trained and served."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from kvasir.export.directory import export_checkpoint
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.configuration.recurrences import Lstm
from kvasir.model.directory import ModelDirectory, load_model_dir
from kvasir.model.network.cross_attention import CrossAttention, Source
from kvasir.model.network.positions import Positions
from kvasir.model.network.recurrent.lstm import LstmMixer
from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import generate
from kvasir.server.errors import InvalidRequestError
from kvasir.server.explain.explainer import Explainer
from kvasir.server.explain.explanation import Head, Questions
from kvasir.server.process.local_server import serve_locally
from tests.kit.fake_runner import TIMEOUT
from tests.kit.fake_seq2seq import read, small_lstm_config
from tests.kit.short_samples import shorten_samples
from tests.kit.training_runs import trained, undrawn

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)
without_pictures = pytest.fixture(scope="module", autouse=True)(undrawn)


def make_mixer(*, encoder: bool, both_ways: bool = False) -> LstmMixer:
    torch.manual_seed(1)
    config = small_lstm_config(cross_attention="none")
    if encoder:
        assert config.encoder is not None
        config = config.encoder
        object.__setattr__(config, "recurrence", Lstm(width=12, both_ways=both_ways))
    assert isinstance(config.recurrence, Lstm)
    mixer = LstmMixer(config, config.recurrence).eval()
    nn.init.normal_(mixer.bias)
    return mixer


def theirs(mixer: LstmMixer, direction: int) -> nn.LSTM:
    """PyTorch's own of one direction, whose gates are i, f, g and o."""
    made = nn.LSTM(mixer.weight.shape[2], mixer.width, batch_first=True)
    halves = mixer.bias[direction].chunk(2)
    values = (mixer.weight[direction], mixer.recurrent[direction], *halves)
    for parameter, own in zip(made.parameters(), values, strict=True):
        i, o, f, g = own.detach().chunk(4)
        parameter.data = torch.cat((i, f, g, o))
    return made


@pytest.mark.parametrize("both_ways", [False, True])
@torch.no_grad()
def test_an_encoder_reads_each_row_from_its_own_end(both_ways: bool) -> None:
    """As PyTorch does with a row of packed and reversed vectors; padding changes nothing."""
    mixer, x = make_mixer(encoder=True, both_ways=both_ways), torch.randn(3, 7, 16)
    lengths = torch.tensor([7, 1, 4])
    parts = []
    if both_ways:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        parts.append(pad_packed_sequence(theirs(mixer, 0)(packed)[0], batch_first=True)[0])
    rows = zip(x, lengths.tolist(), strict=True)
    backwards = [theirs(mixer, -1)(row[:n].flip(0)[None])[0][0].flip(0) for row, n in rows]
    parts.append(nn.utils.rnn.pad_sequence(backwards, batch_first=True))
    expected = mixer.output(torch.cat(parts, dim=-1))
    shown = mixer(x, Positions(lengths=lengths))
    for row, (ours, own) in enumerate(zip(shown, expected, strict=True)):
        torch.testing.assert_close(ours[: lengths[row]], own[: lengths[row]])


@torch.no_grad()
def test_a_decoder_in_pieces_has_the_state_of_the_whole() -> None:
    mixer, x = make_mixer(encoder=False), torch.randn(2, 6, 16)
    state: tuple[Tensor, ...] = tuple(torch.randn(2, 24) for _ in range(2))
    own, (hidden, cell) = theirs(mixer, 0)(x, tuple(part[None] for part in state))
    whole = torch.tensor([6, 6])
    shown, last = mixer.mix(x, state, whole)
    torch.testing.assert_close(shown, mixer.output(own))
    torch.testing.assert_close(torch.stack(last), torch.cat((hidden, cell)))
    pieces = []
    for part in x.split((1, 3, 2), dim=1):
        padded = torch.cat((part, torch.randn(2, 2, 16)), dim=1)
        shown_of_part, state = mixer.mix(padded, state, torch.full((2,), part.shape[1]))
        pieces.append(shown_of_part[:, : part.shape[1]])
    torch.testing.assert_close(torch.cat(pieces, dim=1), shown)
    assert all(map(torch.equal, state, mixer.mix(x, state, torch.zeros(2))[1]))


@torch.no_grad()
def test_additive_attention_is_the_formula() -> None:
    """Σ softmax(v · tanh(W s + U h)) V h, a head and a pair of vectors at a time."""
    torch.manual_seed(2)
    config = small_lstm_config(cross_attention="additive")
    assert config.encoder is not None
    attention = CrossAttention(config, config.encoder)
    assert attention.score is not None
    x, hidden, lengths = torch.randn(2, 3, 16), torch.randn(2, 5, 16), torch.tensor([5, 2])
    query, key, value = attention.query.weight, *attention.key_value.weight.chunk(2)
    for row, n in enumerate(lengths.tolist()):
        for place in range(3):
            read = []
            for head in range(2):
                own = slice(8 * head, 8 * head + 8)
                scores = [
                    attention.score[head] @ (query[own] @ x[row, place] + key[own] @ h).tanh()
                    for h in hidden[row, :n]
                ]
                weights = torch.stack(scores).softmax(dim=0)
                read.append(weights @ (hidden[row, :n] @ value[own].T))
            expected = attention.output(torch.cat(read))
            made = attention(x, Source(hidden, lengths))[row, place]
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)
    hidden[1, 2:] = torch.nan
    again = attention(x, Source(hidden, lengths))[1]
    alone = attention(x[1:], Source(hidden[1:, :2], lengths[1:]))[0]
    torch.testing.assert_close(again, alone, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def check_explanation(network: Transformer, model_dir: ModelDirectory) -> None:
    """The alignment is the network's, and so are the next tokens; a plain LSTM has no heads."""
    explainer, tokenizer, config = Explainer(model_dir), model_dir.tokenizer, model_dir.config
    explained = explainer.explain("38", [0, 1], Questions(lens=2), target="three")
    network.eval()
    source, given = read(network, tokenizer.encode("38").ids), dict[int, Tensor]()
    attentions = dict(enumerate(m for m in network.modules() if isinstance(m, CrossAttention)))
    for layer, attention in attentions.items():
        attention.register_forward_hook(lambda _, x, __, i=layer: given.update({i: x[0][0]}))
    logits = network(torch.tensor([explained.token_ids]), source=source)[0, -1]
    likeliest = explained.next_tokens[0]
    assert likeliest.token_id == logits.argmax()
    assert likeliest.probability == pytest.approx(logits.softmax(0).max().item(), rel=1e-4)
    assert explained.lens[-1][0].token_id == likeliest.token_id
    assert explained.weights == {}
    assert sorted(explained.source_weights) == sorted(given)
    for layer, x in given.items():
        attention = attentions[layer]
        assert attention.score is not None
        keys = attention.keys_and_values(source.hidden).key[0, 0]
        scores = (attention.query(x)[:, None] + keys).tanh() @ attention.score[0]
        np.testing.assert_allclose(
            explained.source_weights[layer][0], scores.softmax(dim=-1), rtol=1e-3, atol=1e-6
        )
    assert config.heads_of(0) == (1 if given else 0)
    with pytest.raises(InvalidRequestError, match=r"without|no heads"):
        explainer.explain("38", [0], Questions(without=(Head(0, 0),)), target="three")


@pytest.mark.parametrize("preset", ["tiny-lstm", "tiny-lstm-attention"])
def test_a_preset_is_trained_exported_and_served(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's greedy answers are those of the network, whatever the company."""
    monkeypatch.chdir(tmp_path)
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    pairs = [(a + b, f"{digits[int(a)]} {digits[int(b)]}") for a in "0123456789" for b in "02468"]
    Path("pairs.tsv").write_text("\n".join("\t".join(pair) for pair in pairs))
    shape = [f"--set={name}=32" for name in ("d_model", "head_dim")]
    shape += ['--set=recurrence={"kind": "lstm", "width": 32}', "--set=vocab_size=290"]
    options = ["--context=16", "--batch-size=16", "--steps=12", "--learning-rate=0.01"]
    trained("pairs.tsv", f"--preset={preset}", *shape, *options, "--warmup=2", "--out=run")
    export_checkpoint(Path("run"), Path("made"), precision="fp32")
    checkpoint = load_checkpoint(Path("run"))
    check_explanation(checkpoint.decoder, load_model_dir(Path("made")))
    sources = [source for source, _ in pairs[::13]]
    with serve_locally(Path("made")) as url, httpx.Client(base_url=url, timeout=TIMEOUT) as client:

        def answer(**fields: object) -> list[str]:
            body = json.dumps({"temperature": 0, "max_tokens": 9, **fields})
            choices = client.post("/v1/completions", content=body).raise_for_status().json()
            return [choice["text"] for choice in choices["choices"]]

        together = answer(prompt=sources)
        assert together == [text for source in sources for text in answer(prompt=source)]
        beams = answer(prompt=sources, num_beams=3)
        assert beams == [text for source in sources for text in answer(prompt=source, num_beams=3)]
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    for source, text in zip(sources, together, strict=True):
        ids = generate(
            checkpoint.decoder,
            list(config.target_prefix),
            max_tokens=9,
            ending_ids=config.eos_token_ids,
            source=read(checkpoint.decoder, tokenizer.encode(source).ids),
        )
        assert tokenizer.decode(ids) == text
