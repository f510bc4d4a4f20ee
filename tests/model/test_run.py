"""`kvasir train`: text becomes a run; a mistake becomes one line and leaves nothing behind."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.network.transformer import Transformer
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training import run
from kvasir.model.training.data.tokens import open_arrays
from kvasir.model.training.distributed import Processes
from kvasir.model.training.metrics import StepMetrics
from kvasir.model.training.report import expected_time
from kvasir.model.training.trainer import Report, Trainer
from tests.kit.encoders import BERT
from tests.kit.random_models import make_config
from tests.kit.training_runs import kvasir_train, leave_undrawn, metrics, trained

SHAPE = ("n_layer=1", "d_model=32", "d_ff=48", "n_head=2", "n_kv_head=1", "head_dim=16")
QUICK = [*(f"--set={change}" for change in SHAPE), "--context=8", "--batch-size=2", "--warmup=1"]
SMALL = [*QUICK, "--set=vocab_size=270"]
ONE_LSTM_LAYER = ("--set=recurrent_layers=[0]", "--set=layers_without_feed_forward=[0]")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with a corpus in `texts`."""
    monkeypatch.chdir(tmp_path)
    leave_undrawn(monkeypatch)
    write_texts()
    return tmp_path


def write_texts() -> None:
    Path("texts").mkdir()
    for name in ("one", "two"):
        Path("texts", f"{name}.txt").write_text(f"{name} fish swims in the sea. " * 30)


def files() -> set[str]:
    return {path.as_posix() for path in Path().rglob("*")}


def refused(*arguments: str) -> str:
    """What a command that must fail says; it leaves every file as it was."""
    before = files()
    result = kvasir_train(*arguments)
    assert result.exit_code == 1
    assert files() == before
    *stages, message = result.stderr.splitlines()
    assert all(re.fullmatch(r" *\d+\.\d s  (training|encoding) the \w+", stage) for stage in stages)
    assert message.startswith("kvasir: ")
    return message.removeprefix("kvasir: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "bad does not exist"),
        (b"\x7fELF\0\1", "bad is not UTF-8 text; convert it, or leave it out"),
        (b"hi", "the corpus has 2 tokens, too few for a context of 8; add text"),
    ],
)
def test_a_corpus_that_cannot_be_trained_on(content: bytes | None, message: str) -> None:
    if content is not None:
        Path("bad").write_bytes(content)
    assert refused("bad", "--out", "run", *SMALL) == message


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of everything that commands below name; to be read only."""
    folder = tmp_path_factory.mktemp("corpora")
    with chdir(folder):
        write_texts()
        write_corpora()
        pair = '{"query": "a", "document": "b"}\n'
        Path("one.jsonl").write_text(pair * 9)
        Path("mixed.jsonl").write_text(pair + pair.replace("}", ', "negative": "c"}'))
        Path("sources.jsonl").write_text('{"source": "a", "target": "b"}')
        bare = json.loads(train_tokenizer([], 257).to_str())
        bare["added_tokens"] = []
        bare["model"]["vocab"]["other"] = bare["model"]["vocab"].pop("<|endoftext|>")
        Path("bare.json").write_text(json.dumps(bare))
        Path("base").mkdir()
        encoder = Transformer(make_config(vocab_size=290, **BERT))
        encoder.config.save(Path("base/config.json"))
        train_tokenizer([], 270, "encoder").save("base/tokenizer.json")
        save_file(encoder.state_dict(), "base/model.safetensors")
    return folder


PROJECTED = '--set pooling={"kind":"cls","projections":[{"d_out":3}]}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("texts --preset huge", "no preset 'huge'"),
        ("texts --set dropout", "--set takes name=value, not 'dropout'"),
        ("texts --set depth=3", "unknown field 'depth'"),
        ("texts --set dropout=none", "'none'"),
        ("texts --set n_head=true", "True"),
        ("texts --set n_kv_head=5", "n_head must be a multiple of n_kv_head, 5"),
        ("texts --set norm=batchnorm", "'batchnorm'"),
        ("texts --set causal=false --context 2", "--context must be more than 2, not 2"),
        ("texts --set vocab_size=99", "not 99"),
        ("texts --set bos_token_id=1", "bos_token_id follows from the tokenizer"),
        ("texts --tokenizer t.json --set vocab_size=300", "vocab_size follows from the tokenizer"),
        ("texts --tokenizer nowhere.json", "nowhere.json does not exist"),
        ("texts --tokenizer texts/one.txt", "texts/one.txt is not a tokenizer"),
        ("texts --include *.rs", "no text in texts"),
        ("texts --init nowhere", "nowhere does not exist"),
        ("texts --init hf://name", "hf://name is not of the form hf://org/name"),
        (
            "texts --init x --preset tiny --tokenizer t --set dropout=0.1 --set n_layer=2",
            "leave out --preset, --tokenizer, --set n_layer",
        ),
        ("pairs.jsonl --preset tiny", "pairs are for a model that makes vectors"),
        ("chats.jsonl --preset tiny-encoder", "chats.jsonl:1: not a pair"),
        ('texts --set pooling={"kind":"last"}', "is trained on pairs, not on text"),
        ("pairs.jsonl --preset tiny-encoder --batch-size 5", "a batch of 5 is more than 4 pairs"),
        ("texts --preset tiny-encoder --tokenizer bare.json", "needs the token [MASK] or <mask>"),
        ("one.jsonl --preset tiny-encoder", "there are 1 different lines; give at least 4"),
        ("mixed.jsonl --preset tiny-encoder", "1 of 2 pairs lack a negative"),
        (f"pairs.jsonl --init base {PROJECTED}", "pooling.projections must be those of"),
        ("sources.jsonl --preset tiny", "use --preset tiny-seq2seq"),
        ("sources.jsonl --preset tiny --label-smoothing 0.1", "is for an encoder-decoder"),
        ("texts/one.txt --preset tiny-seq2seq", "texts/one.txt holds no sources and targets"),
        ("pairs.tsv --preset tiny-seq2seq --context 1", "there are 0 translations of up to 1"),
        ("pairs.tsv --preset tiny-seq2seq --batch-size 9", "fewer than a batch of 9"),
        ("pairs.tsv --preset tiny-seq2seq --set encoder=3", "encoder must be an object"),
        ("pairs.tsv --preset tiny-seq2seq --tokenizer bare.json", "needs the token <|endoftext|>"),
    ],
)
def test_settings_and_corpora_that_do_not_fit(
    arguments: str, message: str, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpora)
    corpus, *options = arguments.split()
    assert message in refused(corpus, "--out", "run", "--context", "16", *options)


def test_a_corpus_and_a_new_folder_are_needed() -> None:
    assert "name at least one file or folder" in refused("--out", "run")
    for out, message in (
        ("texts", "texts is not empty; continue it"),
        ("texts/one.txt", "one.txt"),
    ):
        assert message in refused("texts", "--out", out, *SMALL)


def test_a_seed_that_no_generator_takes_is_a_usage_error() -> None:
    for seed in ("-1", str(2**64)):
        result = kvasir_train("texts", "--out", "run", *SMALL, "--seed", seed)
        assert result.exit_code == 2
        assert "--seed" in result.stderr
        assert not Path("run").exists()


def test_a_fresh_run_writes_what_resuming_and_exporting_need() -> None:
    output = trained(
        *("texts", "--out", "runs/a", *SMALL, "--steps", "3", "--seed", "4", "--tensorboard"),
        *("--set", "dropout=0.1"),
    )
    names = {path.name for path in Path("runs/a").iterdir()}
    assert names == {"data", "loss.png", "metrics.csv", "step-00000003", "tensorboard"}
    checkpoint = load_checkpoint(Path("runs/a"))
    config = checkpoint.decoder.config
    assert (config.n_layer, config.d_model, config.n_kv_head, config.dropout) == (1, 32, 1, 0.1)
    assert config.vocab_size == checkpoint.tokenizer.get_vocab_size() <= 270
    assert (config.bos_token_id, config.eos_token_ids) == (0, (0,))
    assert checkpoint.progress["settings"]["seed"] == 4
    assert open_arrays(Path("runs/a/data"))["n_train"] == checkpoint.progress["train_tokens"]
    assert [row["step"] for row in metrics("runs/a")] == ["1", "2", "3"]
    assert "2 documents" in output
    assert "held-out loss" in output
    files = [path for path in Path("runs/a").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1
    trained("--resume", "--out", "runs/a")  # which writes events, too
    assert len(list(Path("runs/a/tensorboard").glob("events.*"))) == 2


def test_the_steps_follow_the_text() -> None:
    output = trained("texts", "--out", "run", *SMALL, "--batch-size=64")
    progress = load_checkpoint(Path("run")).progress
    steps = progress["settings"]["steps"]
    assert progress["step"] == steps == math.ceil(16 * progress["train_tokens"] / (64 * 8))
    assert f"{steps:,} steps of 512 tokens, 16." in output
    assert len([row for row in metrics("run") if row["held_out_loss"]]) >= 5


def test_the_expected_time_comes_with_a_shorter_run() -> None:
    alone = Processes(0, 1, torch.device("cpu"))
    taste = {0.1: "300 takes 30 s", 0.5: "300 takes 2 min", 4.0: "150 takes 10 min"}
    for seconds, shorter in taste.items():
        assert f"; for a taste, --steps {shorter};" in expected_time(seconds, 0, 2000, alone)
    assert "about 46 days on" in expected_time(100.0, 0, 40_000, alone)
    assert "a smaller --preset or --context learns sooner" in expected_time(100.0, 0, 40_000, alone)
    for step, steps in ((1000, 2000), (0, 300)):  # it is known, or short already
        assert "taste" not in expected_time(0.5, step, steps, alone)
    assert expected_time(0.01, 0, 900, alone) == ""


def test_a_given_tokenizer_is_used_as_it_is_and_positions_hold_the_context() -> None:
    given = train_tokenizer(["quite other words"], 262)
    given.save("given.json")
    options = ["--tokenizer", "given.json", "--set", "max_model_len=4", "--steps", "1"]
    trained("texts", "--out", "run", *QUICK, *options)
    checkpoint = load_checkpoint(Path("run"))
    assert checkpoint.tokenizer.to_str() == given.to_str()
    assert checkpoint.decoder.config.vocab_size == given.get_vocab_size()
    assert checkpoint.decoder.config.max_model_len == 8


def call_at(step: int, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something while a step is reported, before its checkpoint."""
    train = Trainer.train

    def train_and_call(
        trainer: Trainer, folder: Path, report: Report, forecast: Callable[[float], object]
    ) -> bool:
        def report_and_call(metrics: StepMetrics, speed: float, sample: tuple[str, str]) -> None:
            report(metrics, speed, sample)
            if metrics.step == step:
                call()

        return train(trainer, folder, report_and_call, forecast)

    monkeypatch.setattr(Trainer, "train", train_and_call)


def write_corpora() -> None:
    write_chats()
    names = [f"{colour} {kind}" for colour in ("red", "old", "wet") for kind in ("fish", "tree")]
    pairs = [(f"where is the {name}?", f"the {name} is here") for name in names]
    lines = [json.dumps({"query": query, "document": text}) for query, text in pairs]
    Path("pairs.jsonl").write_text("\n".join(lines))
    labelled = [json.dumps({"text": query, "label": query[13]}) for query, _ in pairs]
    Path("labelled.jsonl").write_text("\n".join(labelled))
    Path("pairs.tsv").write_text("\n".join(f"{query}\t{text}" for query, text in pairs))


@pytest.mark.parametrize(
    "corpus",
    [
        ("texts",),
        ("texts", "--preset=tiny-encoder"),
        ("chats.jsonl", "--chat-template=template.jinja", "--context=40"),
        ("pairs.jsonl", "--preset=tiny-encoder"),
        ("labelled.jsonl",),
        ("pairs.tsv", "--preset=tiny-seq2seq", "--context=32", "--schedule=inverse-sqrt"),
        ("pairs.tsv", "--preset=tiny-lstm", "--context=32", *ONE_LSTM_LAYER),
    ],
    ids=["text", "masked text", "chats", "pairs", "labels", "translations", "lstm"],
)
def test_a_run_that_was_killed_is_resumed_to_the_same_bits(
    corpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpora()
    source, *options = corpus
    options += ["--set=dropout=0.2", "--steps=6", "--evaluate-every=2", "--checkpoint-every=3"]
    with monkeypatch.context() as patch:
        call_at(4, partial(shutil.copytree, "whole", "killed"), patch)
        trained(source, *SMALL, *options, "--out", "whole")
    assert "resuming killed at step 3 of 6" in trained("--resume", "--out", "killed")
    assert_same("killed", "whole")


def assert_same(name: str, other: str) -> None:
    """Compare the metrics, the weights and the files of two runs, bit for bit."""
    assert metrics(name) == metrics(other)
    run, whole = (load_checkpoint(Path(folder)) for folder in (name, other))
    assert run.extra_files == whole.extra_files
    assert all(torch.equal(run.weights[key], whole.weights[key]) for key in whole.weights)


def test_ctrl_c_saves_what_resume_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["texts", *SMALL, "--set=dropout=0.2", "--steps=6"]
    trained(*arguments, "--out", "whole")
    with monkeypatch.context() as patch:
        call_at(3, partial(signal.raise_signal, signal.SIGINT), patch)
        stopped = kvasir_train(*arguments, "--out", "stopped")
    assert stopped.exit_code == 130
    advice = "stopped and saved at step 3; continue with: kvasir train --resume --out stopped\n"
    assert advice in stopped.stdout
    assert Path("stopped/loss.png").is_file()
    trained("--resume", "--out", "stopped")
    assert_same("stopped", "whole")


def die(*_: object) -> None:
    raise SystemExit(137)


def test_a_run_that_died_before_its_first_step_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a fresh nor a resumed run used to accept such a folder."""
    trained("texts", "--out", "whole", *SMALL, "--steps", "3")
    with monkeypatch.context() as patch:
        patch.setattr(run, "train_run", die)
        assert kvasir_train("texts", "--out", "died", *SMALL, "--steps", "3").exit_code == 137
    trained("--resume", "--out", "died")
    assert metrics("died") == metrics("whole")


def test_a_preparation_that_died_leaves_no_run_and_does_not_hinder_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("run/data.part-killed/data").mkdir(parents=True)
    Path("run/step-00000000.part").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", die)
        assert kvasir_train("texts", "--out", "run", *SMALL, "--steps", "1").exit_code == 137
    assert not list(Path("run").iterdir())
    trained("texts", "--out", "run", *SMALL, "--steps", "1")


def test_resume_refuses_what_it_would_not_heed_and_names_what_a_run_has_lost() -> None:
    """More steps, another rate or text given with --resume used to be passed over in silence."""
    assert "texts holds no checkpoint" in refused("--resume", "--out", "texts")
    trained("texts", "--out", "run", *SMALL, "--steps", "1")
    resuming = ("--resume", "--out", "run")
    message = "--resume continues the run with its own text and settings; leave out "
    assert refused("texts", *resuming) == message + "corpus"
    more = ("--steps", "9", "--set", "n_layer=2")
    assert refused(*resuming, *more) == message + "--set, --steps"
    trained(*resuming)
    Path("run/data/data.safetensors").rename("kept")
    assert "run/data holds no data.safetensors" in refused(*resuming)
    Path("kept").rename("run/data/data.safetensors")
    step = Path("run/step-00000001")
    (step / "training.safetensors").write_bytes(b"\0")
    assert "training.safetensors cannot be loaded" in refused(*resuming)
    (step / "training.json").write_text('{"step": 1}')
    incomplete = "training.json is incomplete ('settings'); it cannot be resumed"
    assert incomplete in refused(*resuming)
    (step / "training.json").unlink()
    not_trained = "was not written by a training run, so it cannot be resumed"
    assert not_trained in refused(*resuming)


# From a checkpoint, and on chats

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_chats(n: int = 8) -> None:
    turns = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "one fish"}]
    Path("chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * n)
    Path("template.jinja").write_text(TEMPLATE)


def test_a_run_begins_with_another_and_resumes_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trained("texts", "--out", "base", *SMALL, "--set=max_model_len=8", "--steps", "2")
    base = load_checkpoint(Path("base"))
    files = {
        "generation_config.json": b'{"temperature": 0.5}',
        "chat_template.jinja": b"{{ messages }}",
    }
    for name, content in files.items():
        (base.path / name).write_bytes(content)
    tuning = ["texts/one.txt", "--init=base", "--context=8", "--batch-size=2", "--steps=1"]
    trained(*tuning, "--out", "tuned", "--learning-rate=0", "--set=dropout=0.25")
    tuned = load_checkpoint(Path("tuned"))
    assert tuned.config == replace(base.config, dropout=0.25)
    assert tuned.tokenizer.to_str() == base.tokenizer.to_str()
    assert json.loads(tuned.extra_files.pop("examples.json"))
    assert tuned.extra_files == files
    assert tuned.progress["step"] == 1
    assert all(torch.equal(tuned.weights[name], base.weights[name]) for name in base.weights)

    message = refused("texts", "--out", "run", "--init", "base", "--context=9")
    assert message.endswith("use --context 8 or less")
    with monkeypatch.context() as patch:
        patch.setattr(run, "train_run", die)
        kvasir_train(*tuning, "--out", "died")
    assert load_checkpoint(Path("died")).progress["settings"]["learning_rate"] == 1e-3
    shutil.rmtree("base")
    trained("--resume", "--out", "died")


def test_chats_are_learned_from_a_template_that_travels_along() -> None:
    write_chats()
    options = ["--chat-template", "template.jinja", *SMALL, "--context=40", "--steps=1"]
    output = trained("chats.jsonl", *options, "--out", "whole")
    assert "8 conversations" in output
    assert "0 conversations longer than 40 tokens were cut, 0 without an answer" in output
    checkpoint = load_checkpoint(Path("whole"))
    assert checkpoint.extra_files["chat_template.jinja"].decode() == TEMPLATE
    tokens = json.loads(checkpoint.extra_files["special_tokens_map.json"])
    assert tokens == dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    assert checkpoint.decoder.config.eos_token_ids == (0,)

    tuning = ["chats.jsonl", "--init", "whole", "--context=40", "--batch-size=2", "--steps=1"]
    trained(*tuning, "--out", "tuned")  # with the template that it brings
    assert load_checkpoint(Path("tuned")).extra_files == checkpoint.extra_files


def test_what_ends_an_answer_ends_generation_from_then_on() -> None:
    """A base model's own end of text would never come after an answer."""
    write_chats()
    Path("template.jinja").write_text(TEMPLATE.replace("eos_token", "'<|im_end|>'"))
    given = train_tokenizer(["who? one fish user assistant"], 262)
    given.add_special_tokens(["<|im_end|>"])
    given.save("given.json")
    options = ["--chat-template", "template.jinja", *QUICK, "--context=60", "--steps=1"]
    warning = "no answer ends in a special token of the tokenizer"
    assert warning in trained("chats.jsonl", "--out", "a", "--set=vocab_size=270", *options)
    output = trained("chats.jsonl", "--out", "run", "--tokenizer", "given.json", *options)
    assert warning not in output
    assert load_checkpoint(Path("run")).decoder.config.eos_token_ids == (
        0,
        given.token_to_id("<|im_end|>"),
    )


def test_chats_that_cannot_be_trained_on() -> None:
    write_chats()
    assert "cannot be mixed with text" in refused("texts", "chats.jsonl", "--out", "run", *SMALL)
    Path("folder.jsonl").mkdir()  # folders are text
    assert refused("folder.jsonl", "--out", "run", *SMALL) == "no text in folder.jsonl"
    chats = ("chats.jsonl", "--out", "run", *SMALL)
    assert "--chat-template FILE" in refused(*chats)
    assert "nowhere.jinja" in refused(*chats, "--chat-template", "nowhere.jinja")
    given = ["--chat-template", "template.jinja"]
    Path("template.jinja").write_text("{% if %}")
    assert refused(*chats, *given).startswith("the chat template is not valid: ")
    Path("template.jinja").write_text(TEMPLATE)
    with Path("chats.jsonl").open("a") as file:
        file.write("{}\n")
    assert refused(*chats, *given).startswith("chats.jsonl:9: not a chat, ")
