import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training import checkpoint
from training.checkpoint import Checkpoint
from training.config import PRESETS
from training.data import DataSet
from training.errors import CheckpointError
from training.networks import Network


def state(step: int = 5) -> Checkpoint:
    network = Network(PRESETS["tiny"].network)
    return Checkpoint(PRESETS["tiny"], ("a", "b"), "digest", "a machine", step=step, network=network.state_dict())


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    saved = state()
    checkpoint.save(saved, tmp_path)
    loaded = checkpoint.load(tmp_path)
    assert (loaded.config, loaded.classes, loaded.hardware, loaded.step) == (saved.config, saved.classes, saved.hardware, 5)
    assert loaded.digest == "digest"
    assert all(torch.equal(loaded.network[key], value) for key, value in saved.network.items())


def test_a_checkpoint_with_an_unknown_setting_is_rejected(tmp_path: Path) -> None:
    """A field that this version lacks cannot be kept, so the run would go on as a different one."""
    checkpoint.save(state(), tmp_path)
    values = torch.load(tmp_path / checkpoint.FILE)
    values["config"]["training"]["momentum"] = 0.9
    torch.save(values, tmp_path / checkpoint.FILE)
    with pytest.raises(CheckpointError, match=r"training\.momentum: Unexpected keyword argument"):
        checkpoint.load(tmp_path)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """A real failing write: the process may write no file over 4 kB, less than a checkpoint takes."""
    checkpoint.save(state(step=5), tmp_path)
    program = f"""
import resource, signal
from tests.training.test_checkpoint import *
new = state(step=6)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    checkpoint.save(new, Path({str(tmp_path)!r}))
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "could not write" in done.stdout
    assert "the one before is whole" in done.stdout
    assert checkpoint.load(tmp_path).step == 5
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
def test_a_damaged_checkpoint_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: not a checkpoint of this program, or damaged"):
        checkpoint.load(tmp_path)


def test_weights_that_do_not_fit_the_network_are_rejected(tmp_path: Path) -> None:
    saved = state()
    saved.network.popitem()
    with pytest.raises(CheckpointError, match="the checkpoint's weights are not this network's, or another version wrote them"):
        saved.restored()


def test_restoring_uses_the_averaged_weights() -> None:
    saved = state()
    saved.average = {key: value + 1 for key, value in saved.network.items()}
    for key, value in saved.restored().state_dict().items():
        assert torch.equal(value, saved.average[key])


def test_a_missing_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint there; expected a folder that `captrain train --out` has filled"):
        checkpoint.load(tmp_path)


def test_code_in_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save({"config": Code()}, tmp_path / checkpoint.FILE)
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_a_failed_first_write_mentions_no_earlier_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as found:
        checkpoint.write_atomically(tmp_path / "none" / "x", b"")
    assert "whole" not in str(found.value)


def test_a_run_without_a_recorded_process_count_resumes_with_any(data: DataSet, tmp_path: Path) -> None:
    config = PRESETS["tiny"]
    checkpoint.save(Checkpoint(config, data.classes, data.digest, optimizers={"adam": {"x": 1}}), tmp_path)
    assert checkpoint.resumable(tmp_path, config, data, processes=2).processes == 2
