"""Collects the nodes and tensors of an ONNX graph; weights refer to the file of external data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

OPSET, IR_VERSION = 21, 10  # what onnxruntime 1.20 reads; onnx itself would write newer ones
MICROSOFT = "com.microsoft"


class Graph:
    """Values are known by name. Each method adds a node and returns the name of its first output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._constants: dict[Any, str] = {}
        self._count = 0

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: int | Sequence[str] = 1,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """`outputs`: their number, or their names. Absent inputs are ""."""
        from onnx import helper

        self._count += 1
        name = f"{operator}_{self._count}"
        names = [f"{name}_{index}" for index in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=name, domain=domain, **attributes))
        return names[0]

    def split(self, value: str, sizes: Sequence[int]) -> list[str]:
        """Along the last dimension."""
        first = self.node("Split", [value, self.integers(sizes)], len(sizes), axis=-1)
        return [f"{first.removesuffix('_0')}_{index}" for index in range(len(sizes))]

    def integers(self, values: Sequence[int]) -> str:
        import numpy as np

        return self.constant(np.array(values, dtype=np.int64))

    def number(self, value: float, dtype: Any) -> str:
        import numpy as np

        return self.constant(np.array(value, dtype=dtype))

    def constant(self, value: np.ndarray) -> str:
        """The same value is stored once."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = self.tensor(f"constant_{len(self._constants)}", value)
        return self._constants[key]

    def tensor(self, name: str, value: np.ndarray) -> str:
        """A small one, stored within the graph's file."""
        from onnx import numpy_helper

        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def external(self, name: str, data_type: int, shape: Sequence[int], file: str, offset: int, length: int) -> str:
        """A tensor whose bytes are in `file`."""
        from onnx import TensorProto

        tensor = TensorProto(name=name, data_type=data_type, dims=list(shape), data_location=TensorProto.EXTERNAL)
        for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        self.initializers.append(tensor)
        return name

    def input(self, name: str, data_type: int, shape: Sequence[str | int]) -> str:
        from onnx import helper

        self.inputs.append(helper.make_tensor_value_info(name, data_type, list(shape)))
        return name

    def output(self, name: str, data_type: int, shape: Sequence[str | int]) -> None:
        from onnx import helper

        self.outputs.append(helper.make_tensor_value_info(name, data_type, list(shape)))

    def model(self, name: str, producer_version: str) -> Any:
        from onnx import helper

        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=IR_VERSION,
            producer_name="sojourn",
            producer_version=producer_version,
        )
