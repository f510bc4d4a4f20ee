"""Two processes against one: equal losses, also after both were killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch

from kvasir.model.checkpoint import load_checkpoint, load_state
from kvasir.model.training.distributed import PeerError, Processes, one_process
from tests.kit.training_runs import kvasir_train, metrics, trained, undrawn

ROOT = Path(__file__).parents[2]
SHAPE = ("n_layer=2", "d_model=32", "d_ff=48", "n_head=2", "n_kv_head=1", "head_dim=16")
STEPS = 16
# In float32: in bfloat16, gradients summed over two halves of a batch are off by a percent.
OPTIONS = [
    *(f"--set={change}" for change in (*SHAPE, "vocab_size=270")),
    *("--context=48", "--batch-size=4", "--accumulate=2", "--warmup=2", f"--steps={STEPS}"),
    *("--evaluate-every=4", "--checkpoint-every=2", "--no-mixed-precision"),
]
without_pictures = pytest.fixture(scope="module", autouse=True)(undrawn)
LIMIT = 900.0  # seconds, for all processes that wait for one another in vain


class Pairs:
    """Processes that train in pairs, and whose output is one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def tell(self, line: str) -> None:
        self._input.write(f"{line}\n")
        self._input.flush()

    def start(self, *arguments: str) -> None:
        self.tell(json.dumps(arguments))

    def wait_for(self, beginning: str) -> list[str]:
        """Return the lines up to one that begins like this."""
        lines: list[str] = []
        for line in self._output:
            lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return lines
        raise AssertionError("\n".join(lines))

    def processes(self) -> list[psutil.Process]:
        """Return those of the pair, by rank."""
        children = psutil.Process(self._process.pid).children()
        return sorted(children, key=lambda child: child.pid)


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kit.held_training"]
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:

        def end() -> None:
            if process.poll() is None:
                for running in [*psutil.Process(process.pid).children(), process]:
                    running.kill()

        limit = Timer(LIMIT, end)
        limit.start()
        try:
            yield Pairs(process)
        finally:
            limit.cancel()
            end()


def losses(folder: Path) -> torch.Tensor:
    """[steps, 3]: loss, held-out loss (0 where it was not measured) and gradient norm."""
    rows, columns = metrics(folder), ("train_loss", "held_out_loss", "gradient_norm")
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    numbers = [[float(row[column] or 0.0) for column in columns] for row in rows]
    return torch.tensor(numbers, dtype=torch.float64)


def assert_same_losses(folder: Path, other: Path, steps: int = STEPS) -> None:
    """Compare the first steps to 1e-5: sums over two halves are rounded differently."""
    torch.testing.assert_close(losses(folder), losses(other)[:steps], rtol=1e-5, atol=0.0)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for chats with answers of different lengths: halves of a batch differ in targets."""
    folder = tmp_path_factory.mktemp("chats")
    answers = ["yes", "no, the sea is blue and the fish is red and the sea", "one"] * 12
    lines = []
    for answer in answers:
        turns = [{"role": "user", "content": "red?"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return [str(folder / "chats.jsonl"), f"--chat-template={folder / 'template.jinja'}"]


@pytest.fixture(scope="module")
def one(chats: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    trained(*chats, f"--out={folder}", *OPTIONS)
    return folder


def test_two_processes_train_as_one_through_kill_and_signal_sharded_and_not(
    pairs: Pairs, chats: list[str], one: Path, tmp_path: Path
) -> None:
    """One run: by two processes, killed; twice by two with shards, one gets SIGTERM; by one.

    Processes are held where they are hit, however fast they are.
    """
    folder = tmp_path / "two"
    pairs.start(*chats, f"--out={folder}", *OPTIONS)
    pairs.wait_for("step 4 ")
    for process in pairs.processes():
        process.kill()
    pairs.wait_for("ended -9 -9")
    # The checkpoint of step 4 comes after its evaluation.
    assert load_checkpoint(folder).progress["step"] == 2
    assert_same_losses(folder, one, 4)

    for start, end in ((2, 4), (4, 8)):  # from a whole state, and from two shards
        pairs.start("--resume", f"--out={folder}", "--shard")
        pairs.wait_for(f"resuming {folder} at step {start}")
        pairs.wait_for(f"step {end} ")
        pairs.processes()[1].send_signal(signal.SIGTERM)
        pairs.tell("")  # to continue
        output = pairs.wait_for("ended 130 130")
        # Only the first process prints.
        stopped = [line for line in output if line.startswith(f"stopped and saved at step {end}")]
        assert len(stopped) == 1
        checkpoint = load_checkpoint(folder)
        assert checkpoint.progress["step"] == end
        files = {path.suffix for path in checkpoint.path.rglob("*.*")}
        assert files == {".jinja", ".json", ".safetensors"}
        assert len(list(checkpoint.path.glob("training/*"))) == 2
        assert_same_losses(folder, one, end)

    trained("--resume", f"--out={folder}")
    assert_same_losses(folder, one)
    weights = load_checkpoint(one).decoder.state_dict()
    for name, tensor in load_checkpoint(folder).decoder.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


def test_shards_of_an_encoder_decoder_train_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its encoder has no embedding of its own. A group of one process has shards, too."""
    pairs = [f"{'fish' * n}{i}\t{i} ships{'!' * n}" for n in range(1, 5) for i in range(9)]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs))
    options = [str(tmp_path / "pairs.tsv"), "--preset=tiny-seq2seq", *OPTIONS, "--steps=2"]
    trained(*options, f"--out={tmp_path / 'one'}")
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    trained(*options, f"--out={tmp_path / 'shards'}", "--shard")
    assert list((tmp_path / "shards").glob("step-*/training/*.safetensors"))
    assert_same_losses(tmp_path / "shards", tmp_path / "one")


def test_an_error_of_the_first_process_ends_both_with_one_line(
    pairs: Pairs, tmp_path: Path
) -> None:
    pairs.start("nowhere", f"--out={tmp_path / 'run'}", *OPTIONS)
    *lines, _ = pairs.wait_for("ended 1 1")
    told = [line for line in lines if line.startswith(("kvasir: ", "Traceback"))]
    assert told == ["kvasir: nowhere does not exist"]


# Without processes


def test_shards_are_read_by_any_number_and_damage_to_them_is_named(
    one: Path, tmp_path: Path
) -> None:
    """A whole tensor is a single slice."""
    folder = tmp_path / "run"
    shutil.copytree(one, folder)
    checkpoint = load_checkpoint(folder)
    state = load_state(checkpoint.path)
    shards = checkpoint.path / "training"
    shards.mkdir()
    (checkpoint.path / "training.safetensors").rename(shards / "shard.safetensors")
    loaded = one_process().load_shards(shards, checkpoint.decoder)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())

    (shards / "shard.safetensors").write_bytes(b"\0" * 9)
    result = kvasir_train("--resume", f"--out={folder}")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"kvasir: {shards} cannot be loaded: ")
    assert result.stderr.count("\n") == 1


def test_shards_need_several_processes(tmp_path: Path) -> None:
    result = kvasir_train("x", f"--out={tmp_path / 'run'}", "--shard")
    assert result.exit_code == 1
    assert "torchrun --nproc-per-node" in result.stderr


@pytest.mark.parametrize(("batch_size", "size"), [(16, 3), (1, 2)])
def test_a_batch_that_cannot_be_split_evenly_is_refused(batch_size: int, size: int) -> None:
    processes = Processes(0, size, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=f"^a batch of {batch_size} cannot be split evenly over {size} processes"
    ):
        processes.rows_per_process(batch_size)
    assert Processes(1, 2, torch.device("cpu")).rows_per_process(6) == 3


def test_one_process_agrees_with_itself_and_keeps_its_errors() -> None:
    processes = one_process()
    assert processes.reduce(2.5) == 2.5
    with pytest.raises(OSError, match="full"), processes.together():
        raise OSError("full")
    assert not issubclass(PeerError, OSError)
