"""What the settings name must be there before work begins: hours of tokenising may lie between a typing error and the
code that reads the file. Sources, tokenizer and template are opened first by `prepare`; the base's config and the
DeepSpeed file by `resolve`."""

from __future__ import annotations

from sojourn.config.schema import RunConfig
from sojourn.data.tokenize.tokenizer import TRAINED, open_tokenizer
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.model.adapter import check_adapter_names, refuse_missing_adapter
from sojourn.model.adapter_check import check_adapter
from sojourn.model.base import base_of, load_model_config, meta_model, require_bitsandbytes
from sojourn.model.folder_check import check_model
from sojourn.run.checkpoints import MANIFEST, checkpoint_path, list_checkpoints


def check_named_files(config: RunConfig) -> None:
    """Raises a UserError that names the setting. Reads no weights."""
    _check_resume(config.save.resume)
    _check_packages(config)
    if config.model.base is None:
        return
    base = expand_user(config.model.base)
    if (base / "config.json").is_file():
        try:
            check_model(base)
        except UserError as error:
            raise UserError(f"model.base: {error}") from None
    if config.method.kind in ("lora", "qlora"):
        _check_adapter(config)


def _check_resume(resume: str) -> None:
    if resume == "auto":
        return
    path = checkpoint_path(expand_user(resume))
    if (path / "run.yaml").is_file():
        if not list_checkpoints(path / "checkpoints"):
            raise UserError(f"{path}: this run has no checkpoint to start from; leave out --fork or save.resume")
    elif not (path / MANIFEST).is_file():
        why = f"no {MANIFEST}" if path.exists() else "no such folder"
        raise UserError(
            f"save.resume: {resume}: not a complete checkpoint ({why}); name a run's folder or one of its checkpoints; "
            "to start from another program's weights, set model.base or method.adapter"
        )


def _check_packages(config: RunConfig) -> None:
    if config.method.kind == "qlora":
        require_bitsandbytes("method.kind: qlora")
    if config.train.optimizer not in ("adamw", "muon"):
        require_bitsandbytes(f"train.optimizer: {config.train.optimizer}")


def _check_adapter(config: RunConfig) -> None:
    method, data = config.method, config.data
    if method.adapter is not None:
        check_adapter(refuse_missing_adapter(method.adapter))
    if data.tokenizer not in TRAINED:
        known, most = open_tokenizer(data.tokenizer).tokenizer, load_model_config(base_of(config)).get_text_config()
        if known.get_vocab_size() > most.vocab_size:
            raise UserError(
                f"data.tokenizer: {known.get_vocab_size()} tokens, but model.base has only {most.vocab_size}; use its "
                "own tokenizer (data.tokenizer=auto), or train all weights: method.kind=full"
            )
    if method.adapter is None and (method.targets != ["all-linear"] or method.modules_to_save):
        check_adapter_names(meta_model(base_of(config)), method)
