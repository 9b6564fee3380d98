"""Where the tensors of a model's own MTP modules, and of its layers, stand in its files. No values are read."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specdec.core.dequantise import ACTIVATION_SCALES
from specdec.core.shards import Shards, fetch_file
from specdec.core.untrusted import read_json
from specdec.heads.native_modules.layouts import COUNT_FIELDS, FAMILIES, LAYOUTS, NativeLayout

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
MODELOPT_FILE = "hf_quant_config.json"
EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.+)")
# Endings of the tensors that stand for a weight in quantised files, behind the name of its linear
PACKED_ENDING = re.compile(
    r"\.(weight_(packed|scale(_2|_inv)?|global_scale|zero_point|shape|g_idx)|input_(global_)?scale|"
    r"qweight|qzeros|scales?|g_idx|pre_quant_scale|[kv]_scale|SCB|weight\.(absmax|quant_.*|nested_.*))$"
)
PACKED_EXPERTS = re.compile(r"(_proj)_(blocks|scales?|scale_inv)$")


def name_plain(key: str) -> str:
    """The name of the plain weight for which a tensor of a quantised file stands; of other tensors their own."""
    return PACKED_EXPERTS.sub(r"\1", PACKED_ENDING.sub(".weight", key))


@functools.lru_cache(maxsize=2**16)  # layers share their roles
def name_role(key: str) -> str:
    """A tensor's name within its layer, the same for experts that are apart, fused or quantised."""
    role = name_plain(key)
    role = re.sub(r"experts\.\d+\.(gate|up)_proj\.weight$", "experts.gate_up_proj", role)
    role = re.sub(r"experts\.\d+\.down_proj\.weight$", "experts.down_proj", role)
    return re.sub(r"experts\.\d+\.", "experts.*.", role)


def read_count(config: dict) -> int:
    """The number of MTP modules that a configuration declares; 0 if it declares none."""
    for fields in (config.get("text_config") or {}, config):
        for key in COUNT_KEYS:
            if isinstance(fields.get(key), int):
                return fields[key]
    return 0


def write_count(config: dict, count: int) -> None:
    """Writes the number of MTP modules under the family's key, and under the others that are there."""
    fields = config.get("text_config") or config
    fields[COUNT_FIELDS.get(str(fields.get("model_type")), COUNT_KEYS[0])] = count
    for place in (fields, config):
        place |= dict.fromkeys(place.keys() & set(COUNT_KEYS), count)


@dataclass(frozen=True)
class StoredModule:
    """One MTP module in a model's files.

    layout: name in LAYOUTS; number: its number, 0 for the first one; layer: number of its layer in the files, None
        where the layout has none
    names: all tensors of the module, copies of the target's among them
    """

    layout: str
    prefix: str
    number: int
    layer: int | None
    names: tuple[str, ...]

    @property
    def kind(self) -> NativeLayout:
        return LAYOUTS[self.layout]

    def write_name(self, path: str) -> str:
        """A name of the layout, such as mtp.fc, as it stands in these files."""
        return self.prefix + path.format(number=self.number, layer=self.layer)

    @functools.cached_property
    def outer(self) -> dict[str, str]:
        """The names of the tensors around the layer by label: enorm, hnorm, join, norm, head."""
        return {label: f"{self.write_name(path)}.weight" for label, path in self.kind.outer_names.items()}

    @property
    def outer_norms(self) -> list[str]:
        """The weights of its norms around the layer."""
        return [name for label, name in self.outer.items() if label not in ("join", "head")]

    @property
    def stem(self) -> str:
        """The beginning of the names of its layer."""
        return self.write_name(self.kind.layer_name) + "."

    def rename(self, prefix: str, layer: int | None) -> dict[str, str]:
        """The names of its tensors under another prefix, and at another layer's number, by their present names."""
        moved = dataclasses.replace(self, prefix=prefix, layer=layer, names=())
        beginnings = {self.stem: moved.stem}
        for label, name in self.outer.items():
            beginnings.setdefault(name.removesuffix("weight"), moved.outer[label].removesuffix("weight"))
        names = {}
        for name in self.names:
            beginning = next(begin for begin in beginnings if name.startswith(begin))
            names[name] = beginnings[beginning] + name.removeprefix(beginning)
        return names

    @functools.cached_property
    def copies(self) -> list[str]:
        """Tensors that are copies of the target's embedding and LM head."""
        return [name for name in self.names if self.kind.copies and name.endswith(self.kind.copies)]

    @functools.cached_property
    def blocks(self) -> dict[str, dict[str, list[str]]]:
        """The tensors of its layers by role, by the beginning of their names. Most modules have one layer."""
        stems = [self.stem]
        if self.kind.chain:
            numbers = {name.removeprefix(self.stem).partition(".")[0] for name in self.names}
            stems = [f"{self.stem}{number}." for number in sorted(numbers)]
        outside = {*self.outer.values(), *self.copies}
        inside = [name for name in self.names if name_plain(name) not in outside]
        return {stem: group_roles(inside, stem) for stem in stems}


def group_roles(names: Iterable[str], stem: str) -> dict[str, list[str]]:
    """The tensors of a layer by role, without scales of its inputs, keys and values.

    stem: beginning of their names; others are left out
    """
    roles: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(stem) and not (ACTIVATION_SCALES.fullmatch(name) or name.endswith("inv_freq")):
            roles.setdefault(name_role(name.removeprefix(stem)), []).append(name)
    return roles


class ModelFiles:
    """A model's tensors by place: its layers, its MTP modules, its embedding and LM head.

    Raises ValueError as `Shards`, and for a configuration without a number of layers.
    """

    def __init__(self, shards: Shards):
        self.shards, self.config = shards, shards.config
        self.text_config: dict[str, Any] = self.config.get("text_config") or self.config
        self.model_type = str(self.text_config.get("model_type"))
        kinds = self.text_config.get("layers_block_type") or self.text_config.get("hybrid_override_pattern") or ()
        self.num_layers = self.text_config.get("num_hidden_layers") or len(kinds)
        if not (isinstance(self.num_layers, int) and self.num_layers):
            raise ValueError(f"{shards.name}: its config.json has no num_hidden_layers: take a complete copy of it.")
        self.modules = find_modules(shards, self.model_type)
        self.prefix, self.layers = self._find_layers()

    @functools.cached_property
    def plain_settings(self) -> list[dict]:
        """The places that name layers in full precision: of config.json, and of ModelOpt's file beside it."""
        settings = [self.config.get("quantization_config") or self.text_config.get("quantization_config")]
        path = fetch_file(self.shards.name, MODELOPT_FILE, revision=self.shards.revision)
        settings.append(None if path is None else read_json(path).get("quantization"))
        return [fields for fields in settings if isinstance(fields, dict) and fields]

    @functools.cached_property
    def module_names(self) -> set[str]:
        """All tensors of its MTP modules."""
        return {name for module in self.modules for name in module.names}

    def _find_layers(self) -> tuple[str, dict[int, dict[str, list[str]]]]:
        """The beginning of the names of the model's own layers, and the tensors of each by role."""
        by_prefix: dict[str, dict[int, list[str]]] = {}
        for key in self.shards.files:
            match = re.match(r"((?:.*?\.)?)layers\.(\d+)\.", key)
            if match and int(match[2]) < self.num_layers and key not in self.module_names:
                by_prefix.setdefault(match[1], {}).setdefault(int(match[2]), []).append(key)
        if not by_prefix:
            return "model.", {}
        prefix = max(by_prefix, key=lambda beginning: sum(map(len, by_prefix[beginning].values())))
        names = by_prefix[prefix]
        return prefix, {number: group_roles(names[number], f"{prefix}layers.{number}.") for number in sorted(names)}

    def find_unknown(self) -> list[str]:
        """Tensors that look like those of MTP modules, and are in none of a known layout."""
        layer = re.compile(rf"{re.escape(self.prefix)}layers\.(\d+)\.")
        names = []
        for key in self.shards.files.keys() - self.module_names:
            match = layer.match(key)
            if "mtp" in key or "nextn" in key or (match and int(match[1]) >= self.num_layers):
                names.append(key)
        return sorted(names)

    def find_alike(self, block: dict[str, list[str]]) -> tuple[str, dict[str, list[str]]]:
        """The model's layer that has the roles of a module's, or most of them: beginning of its names, its roles."""
        layers = self.layers
        number = min(layers, key=lambda number: (len(layers[number].keys() ^ block.keys()), -number), default=-1)
        return f"{self.prefix}layers.{number}.", layers.get(number, {})

    def find_original(self, copy: str) -> str | None:
        """The model's embedding or LM head that a tensor of a module copies; None if the files lack it."""
        endings = ("embed_tokens.weight",) if copy.endswith("embed_tokens.weight") else ("lm_head.weight",)
        for ending in (*endings, "embed_tokens.weight"):  # a tied LM head is the embedding
            for key in self.shards.files:
                if key not in self.module_names and (key == ending or key.endswith(f".{ending}")):
                    return key
        return None


def find_modules(shards: Shards, model_type: str) -> list[StoredModule]:
    """The MTP modules of a known layout, under any prefix and at any layer's number, the first one first."""
    places_by_layout = {}
    for layout in LAYOUTS:
        places = _find_places(shards, LAYOUTS[layout])
        if places:
            places_by_layout[layout] = places
    if not places_by_layout:
        return []
    layout = FAMILIES.get(model_type, "")
    if layout not in places_by_layout:
        layout = max(places_by_layout, key=lambda name: max(map(len, places_by_layout[name].values())))
        if not is_whole_layout(shards, layout, places_by_layout[layout]):
            return []
    modules = []
    for number, (prefix, place) in enumerate(sorted(places_by_layout[layout])):
        has_layer = "{layer}" in LAYOUTS[layout].layer_name
        empty = StoredModule(layout, prefix, number if has_layer else place, place if has_layer else None, ())
        stems = (empty.stem, *(name.removesuffix("weight") for name in empty.outer.values()))
        names = tuple(key for key in shards.files if key.startswith(stems))
        modules.append(StoredModule(layout, prefix, empty.number, empty.layer, names))
    return modules


def is_whole_layout(shards: Shards, layout: str, places: dict[tuple[str, int], set[str]]) -> bool:
    """Whether names are those of a layout, and not merely like some of them. places: result of `_find_places`"""
    is_numbered = "{layer}" in LAYOUTS[layout].layer_name
    is_apart = is_numbered and not any(is_trunk_prefix(shards, prefix) for prefix, _ in places)
    return not is_apart and max(map(len, places.values())) >= len(LAYOUTS[layout].outer_names)


def is_trunk_prefix(shards: Shards, prefix: str) -> bool:
    """Whether the model's own embedding and norm, too, have this beginning of their names."""
    return any(f"{prefix}{name}.weight" in shards.files for name in ("norm", "embed_tokens", "embeddings"))


def _find_places(shards: Shards, layout: NativeLayout) -> dict[tuple[str, int], set[str]]:
    """The tensors around a layer by place: (prefix, number of the layer or of the module)."""
    paths = [re.escape(path) for path in layout.outer_names.values()]
    paths = [re.sub(r"\\\{(number|layer)\\\}", r"(\\d+)", path) for path in paths]
    patterns = [re.compile(rf"((?:.*\.)?){path}\.weight$") for path in paths]
    places: dict[tuple[str, int], set[str]] = {}
    for name in {name_plain(key) for key in shards.files if "experts." not in key}:
        for pattern in patterns:
            match = pattern.match(name)
            if match:
                number = int(match[2]) if pattern.groups > 1 else 0
                places.setdefault((match[1], number), set()).add(name)
    return places
