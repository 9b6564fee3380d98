"""Run in the engines' Python: SGLang's own classes read the requests of a session, and its unpickler their tensors.

    python sglang_requests.py WHEEL REQUESTS OUT

REQUESTS: JSON list of [path, body]; OUT: tensors by name, as the last rank gets them
"""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.engines.sglang_names import EmptyModules

KINDS = {
    "pause_generation": "PauseGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "continue_generation": "ContinueGenerationReqInput",
}


def main(wheel: str, requests: str, out: str) -> None:
    sys.path.insert(0, wheel)
    sys.meta_path.append(EmptyModules())
    from sglang.srt.managers import io_struct
    from sglang.srt.utils.common import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads

    tensors = {}
    for path, body in json.loads(Path(requests).read_text()):
        request = getattr(io_struct, KINDS[path])(**body)  # raises TypeError for a field that it does not have
        if path == "update_weights_from_tensor":
            payloads = normalize_serialized_named_tensor_payloads(request.serialized_named_tensors)
            tensors |= dict(MultiprocessingSerializer.deserialize(payloads[-1]))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
