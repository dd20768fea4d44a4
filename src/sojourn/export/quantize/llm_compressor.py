"""llm-compressor: GPTQ, AWQ and FP8 for vLLM."""


def why_unavailable() -> str:
    return "is not part of this version"


def install_environment() -> None:
    pass
