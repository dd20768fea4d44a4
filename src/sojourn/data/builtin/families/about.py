"""Questions about Sojourn and about training. There are few facts, so wordings are held out, not facts."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.words import Language

# Verb: what it does, in both languages.
VERBS: dict[str, tuple[str, str]] = {
    "demo": ("It shows the whole journey on this machine.", "在本机上演示整个流程。"),
    "presets": ("It lists, shows and copies named configurations.", "列出、显示和复制预设配置。"),
    "doctor": ("It says what this machine is and what is wrong with it.", "检查这台机器，并指出问题。"),
    "plan": ("It tells memory, time and cost before you pay.", "在付费之前算出显存、时间和费用。"),
    "prepare": ("It turns your data into tokens, ready to train.", "把数据处理成可以训练的词元。"),
    "rehearse": ("It proves in a minute that the run will go through.", "用一分钟证明训练能跑通。"),
    "train": ("It trains, and continues when called again.", "开始训练；再次调用就接着训练。"),
    "eval": ("It measures loss and task accuracy.", "计算损失和任务正确率。"),
    "generate": ("It completes one text.", "续写一段文字。"),
    "chat": ("It opens a conversation with the model.", "与模型对话。"),
    "export": ("It converts the model and proves that nothing changed.", "转换模型，并证明结果一致。"),
    "serve": ("It offers the model through a web API.", "通过网络接口提供模型服务。"),
    "launch": ("It starts a run on a rented machine.", "在租来的机器上启动训练。"),
    "board": ("It shows runs and curves in the browser.", "在浏览器中查看训练和曲线。"),
    "bench": ("It measures speed.", "测量速度。"),
}
# Idea: its names in both languages, what it is in both languages.
IDEAS: dict[str, tuple[str, str, str, str]] = {
    "checkpoint": (
        "a checkpoint",
        "检查点",
        "A saved state from which training continues.",
        "可以从中继续训练的存档。",
    ),
    "gradient": (
        "a gradient",
        "梯度",
        "The direction in which the loss grows fastest.",
        "损失增长最快的方向。",
    ),
    "learning rate": (
        "the learning rate",
        "学习率",
        "The size of a training step.",
        "每一步更新的大小。",
    ),
    "loss": (
        "the loss",
        "损失",
        "A number that says how wrong the model is.",
        "表示模型错得多远的数。",
    ),
    "token": (
        "a token",
        "词元",
        "A small piece of text.",
        "一小段文字。",
    ),
    "batch": (
        "a batch",
        "批次",
        "The examples used in one step.",
        "一步训练所用的样本。",
    ),
    "epoch": (
        "an epoch",
        "轮次",
        "One pass over all the data.",
        "把全部数据过一遍。",
    ),
    "warmup": (
        "warmup",
        "预热",
        "The first steps, in which the learning rate rises.",
        "学习率逐渐升高的最初几步。",
    ),
    "tokenizer": (
        "a tokenizer",
        "分词器",
        "It cuts text into tokens.",
        "把文字切成词元的工具。",
    ),
    "overfitting": (
        "overfitting",
        "过拟合",
        "Learning the examples by heart, not the rule.",
        "记住了样本，却没有学会规律。",
    ),
    "adapter": (
        "an adapter",
        "适配器",
        "A few small weights trained beside a frozen model.",
        "在冻结的模型旁训练的少量权重。",
    ),
    "run folder": (
        "the run folder",
        "运行目录",
        "The folder that holds everything about a run.",
        "保存一次训练全部内容的目录。",
    ),
    "global batch": (
        "the global batch",
        "全局批次",
        "All examples of one step on all devices.",
        "所有设备一步用到的全部样本。",
    ),
}

_ASK_VERB = {
    "en": (
        "What is `sojourn {}` for?",
        "What does `sojourn {}` do?",
        "Explain `sojourn {}`.",
        "Why would I use `sojourn {}`?",
        "Tell me about `sojourn {}`.",
        "sojourn {}?",
    ),
    "zh": (
        "`sojourn {}`是做什么的？",
        "`sojourn {}`有什么用？",
        "请解释`sojourn {}`。",
        "什么时候用`sojourn {}`？",
        "介绍一下`sojourn {}`。",
        "sojourn {}？",
    ),
}
_ASK_IDEA = {
    "en": ("What is {}?", "Explain {}.", "What does one mean by {}?", "Tell me what {} is.", "In one sentence: {}?"),
    "zh": ("什么是{}？", "请解释{}。", "{}是什么意思？", "告诉我什么是{}。", "用一句话说明{}。"),
}


def about(dice: Dice, language: Language) -> tuple[str, str, str]:
    """The key is the fact with the wording: another wording of it may be in training, this one is not."""
    chinese = int(language == "zh")
    if dice.chance(0.5):
        verb = dice.pick(tuple(VERBS))
        wording = dice.below(len(_ASK_VERB[language]))
        prompt = _ASK_VERB[language][wording].format(verb)
        return f"{verb}/{language}{wording}", prompt, VERBS[verb][chinese]
    idea = dice.pick(tuple(IDEAS))
    wording = dice.below(len(_ASK_IDEA[language]))
    prompt = _ASK_IDEA[language][wording].format(IDEAS[idea][chinese])
    return f"{idea}/{language}{wording}", prompt, IDEAS[idea][2 + chinese]
