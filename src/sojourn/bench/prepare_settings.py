"""What every row of `sojourn bench prepare` has in common, ours and the peer's."""

from typing import Any

Row = dict[str, Any]

ROW_LENGTH = 2048  # tokens
BATCH = 1000  # chats
