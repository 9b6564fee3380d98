"""A model as OpenVINO reads it, by optimum-intel, in the environment of OpenVINO GenAI.

    python openvino_convert.py MODEL OUT

MODEL is a target, or the folder of `specdec export format=openvino`. OpenVINO GenAI is told the layers of a head's
inputs: by default it takes the outputs of the layers 2, L // 2 and L - 3, where EAGLE-3 means their inputs. Weights
stay in float32, which holds bfloat16 and float16 exactly; the precision of the kernels is chosen at the start.
"""

import json
import subprocess
import sys
from pathlib import Path

if __package__:
    from specdec.engines.front.converted import keep_converted, write_converted
else:  # run as a program, in an environment without this project
    sys.path.insert(0, str(Path(__file__).parent))
    from converted import keep_converted, write_converted  # type: ignore[no-redef]

LAYERS = "hidden_layers_list"  # the name in config.json of an export, and in OpenVINO's file
GRAPH = "openvino_model.xml"


def convert_model(model: str, folder: Path) -> None:
    """Makes the folder. Raises ValueError where optimum-intel fails."""
    layers = read_layers(model)
    run_optimum(model, folder, ["--trust-remote-code"] * (layers is not None))  # its own class, not the folder's
    if layers is not None:
        write_layers(folder, layers)


def run_optimum(model: str, out: Path, options: list[str]) -> None:
    program = Path(sys.executable).with_name("optimum-cli")
    words = ["export", "openvino", "--model", model, "--task", "text-generation-with-past", "--weight-format", "fp32"]
    run = subprocess.run([program, *words, *options, out], capture_output=True, text=True, errors="replace")
    if run.returncode:
        last = " | ".join(run.stderr.strip().splitlines()[-4:])
        raise ValueError(f"optimum-cli cannot convert {model}: {last}")


def read_layers(model: str) -> list[int] | None:
    """The layers whose outputs a head reads; None for a target. Raises ValueError for a head of another format."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if "draft_vocab_size" in config and LAYERS not in config:
        raise ValueError(f"{model} says not which layers it reads: export it with format=openvino.")
    return config.get(LAYERS)


def write_layers(folder: Path, layers: list[int]) -> None:
    """Writes the layers into the graph, where OpenVINO GenAI looks for them."""
    import openvino

    model = openvino.Core().read_model(folder / GRAPH)
    model.set_rt_info(layers, LAYERS)
    openvino.save_model(model, folder / f"new_{GRAPH}", compress_to_fp16=False)
    del model  # it maps the weights that are replaced now
    for suffix in (".xml", ".bin"):
        path = (folder / GRAPH).with_suffix(suffix)
        path.with_name(f"new_{path.name}").replace(path)


def keep_openvino(model: str, folder: Path) -> Path:
    """OpenVINO's folder of a model inside `folder`, or the model itself where it is one already."""
    if (Path(model) / GRAPH).is_file():
        return Path(model)
    return keep_converted([model], folder, "openvino", lambda out: convert_model(model, out))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python openvino_convert.py MODEL OUT")
    try:
        write_converted([sys.argv[1]], Path(sys.argv[2]), lambda out: convert_model(sys.argv[1], out))
    except ValueError as error:
        raise SystemExit(str(error)) from None
