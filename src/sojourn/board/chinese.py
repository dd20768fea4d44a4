"""Errors, notes and descriptions of presets in Chinese, for pages in Chinese: phrases of which they are made,
translated one by one.

Messages are written in English where they arise. Keys, commands, paths and names are the same in both languages; so is
a phrase that is not listed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_Replacement = str | Callable[[re.Match[str]], str]

_OF_THE_BOARD = {
    r"the Host header (.+) is not this machine": r"Host 头 \1 不是本机",
    r"open the address that `sojourn board` has printed, with its token": "请打开 sojourn board 打印出的带令牌的地址",
    r"the origin (.+) is not allowed": r"不允许来源 \1",
    r"the page is of an earlier start of the board; load it again": "页面来自面板的上一次启动；请重新加载",
    r"the body is larger than ([\d,]*\d) bytes": r"请求内容超过 \1 字节",
    r"no run is called (.+)": r"没有名为 \1 的训练",
    r"no prepared data is called (.+)": r"没有名为 \1 的已处理数据",
    r"no such task": "没有这个任务",
    r"no action is called (.+?); there are": r"没有名为 \1 的操作；可选",
    r"a run on (.+?) goes on with the same launch, or: ": r"\1 上的训练用同一条 launch 命令继续，或：",
    r"runs already": "已在运行",
    r"is on this machine already, in ": "已在本机：",
    r"; there are: ": "；可选：",
    r"a run on this machine is not moved; start it there: ": "本机的训练不能迁移；请在那里启动：",
    r"is not on this machine; bring it home first: ": "不在本机；请先取回：",
    r"no checkpoint of step (\S+)": r"没有第 \1 步的检查点",
    r"a run or a folder is needed": "需要一个训练或文件夹",
    r"a host is needed": "需要一台主机",
    r"a name is needed": "需要一个名称",
    r": (\S+) is needed": r"：需要 \1",
    r"no port from (\d+) on is free": r"从 \1 起没有空闲端口",
    r"the file's name is needed": "需要文件名",
    r"the file is larger than ([\d,]*\d) bytes; name its path instead": r"文件超过 \1 字节；请改填它的路径",
    r"the upload was broken off": "上传中断",
    r"; nothing was kept": "；未保留任何内容",
    r"looking at (?:data|rows) needs (\S+); type: ": r"查看数据需要 \1；请输入：",
    r"outside the folders of this board; upload it, or start: ": "不在本面板的文件夹内；请上传，或这样启动：",
    r"a tokenizer will be trained on this data; the mask is shown once it is prepared": (
        "会用这些数据训练分词器；处理后才显示训练范围"
    ),
    r"Read-only file system": "文件系统只读",
    r"No space left on device": "磁盘已满",
    r"Permission denied": "没有权限",
}
_OF_SETTINGS = {
    r"^command line ([^:]+): ": r"命令 \1：",
    r"no such key": "没有这个设置",
    r"; did you mean (.+?)\?": r"；是不是 \1？",
    r" given; allowed: ": "：不可用；可填：",
    r"; allowed: ": "；可填：",
    r": allowed: ": "：可填：",
    r"a whole number from ([\d,]*\d) up to ([\d,]*\d)": r"\1 到 \2 的整数",
    r"a whole number from ([\d,]*\d)": r"不小于 \1 的整数",
    r"a number above ([\d.,]*\d) up to ([\d.,]*\d)": r"大于 \1、不超过 \2 的数",
    r"a number from ([\d.,]*\d) up to ([\d.,]*\d)": r"\1 到 \2 的数",
    r"a name of letters, digits, “-”, “_” and “\.”, (\d+) at most": (
        r"由字母、数字、“-”、“_”和“.”组成的名称，最多 \1 个字符"
    ),
    r"an amount such as (.+?) or (\$\d+)": r"金额，例如 \1 或 \2",
    r"a duration such as (.+?) or (\w+)": r"时长，例如 \1 或 \2",
    r", or (null|auto|off|true|false)\b": r"，或 \1",
    r"“([^”]*)” is neither a preset nor a file": r"“\1”既不是预设，也不是文件",
    r"\(see: ([^)]+)\)": r"（见：\1）",
    r"name a run: a preset or a YAML file, such as (\w+)": r"请指定训练：预设或 YAML 文件，例如 \1",
    r"no such file or folder": "没有这个文件或文件夹",
    r"no such file": "没有这个文件",
    r"no GPU called (.+?) in the catalogue; it knows cards like (.+?) or (.+?)\. Your own cards go into ": (
        r"目录中没有名为 \1 的显卡；有 \2、\3 等。您自己的显卡请写入 "
    ),
    r"no model called (.+?) in the catalogue; it knows models like (.+?) or (.+?)\. Your own go into ": (
        r"目录中没有名为 \1 的模型；有 \2、\3 等。您自己的请写入 "
    ),
    r"; or give a folder with the model's config\.json": "；或给出含 config.json 的模型文件夹",
    r"no platform called “([^”]*)” \(of (.+)\)": r"没有名为“\1”的平台（有 \2）",
    r"(\S+) sets the length; (\S+) is not used": r"长度由 \1 决定；\2 未使用",
}
_OF_PLANS = {
    r"no data is named": "没有指定数据",
    r"the size of (.+?) is not known here": r"不知道 \1 的大小",
    r"tokens are estimated: the tokenizer is yet to be trained": "token 数为估计值：分词器尚未训练",
    r"tokens are estimated: the tokenizer \((.+?)\) is not on this machine": r"token 数为估计值：本机没有分词器 \1",
    r", so ([\d,]+) examples of ([\d,]+) tokens are assumed": r"，假定为 \1 条、每条 \2 个 token",
    r", so ([\d,]+) steps are assumed": r"，假定为 \1 步",
    r"; give (\S+), (\S+) or (\S+)$": r"；请给出 \1、\2 或 \3",
    r"; give (\S+) or (\S+)$": r"；请给出 \1 或 \2",
    r"a vocabulary of ([\d,]+) tokens \((\S+)\) is assumed; ": r"假定词表为 \1（\2）；",
    r"(\S+) has one for each character of the text": r"\1 为文本的每个字符各设一个",
    r"(\S+) may have another number": r"\1 可能不同",
    r"so little text may give fewer": "这么少的文本可能得到更小的词表",
    r"the data was not measured: ": "没有读取数据：",
    r"([\d,]+) of ([\d,]+) records that were read cannot be used; the first: ": (
        r"读取的 \2 条中有 \1 条不能用；第一条："
    ),
    r": its length is taken from its size": "：长度按文件大小估计",
    r"(\S+) was not opened, for want of (\S+) ": r"缺少 \2，未打开 \1 ",
    r"the base is quantized \((.+?)\), and this plan is for its original weights: train on the original model": (
        r"基座是量化模型（\1），这里按原始权重规划：请用原始模型训练"
    ),
    r"method\.kind not given: using (\w+), which trains adapters; method\.kind=full trains all weights": (
        r"未给出 method.kind：使用 \1，只训练适配器；method.kind=full 训练全部权重"
    ),
}
_OF_PRESETS: dict[str, _Replacement] = {
    r"^From scratch, (\S+?)(?: with (\d+) heads)?: (.+)$": lambda found: (
        f"从头训练，{found[1]}{f'，{found[2]} 个头' if found[2] else ''}：{found[3]}"
    ),
    r"^A shorter demo: ": "更短的演示：",
    r"^Full fine-tuning of a (\w+) model: ": r"\1 模型全参数微调：",
    r"^QLoRA \(4-bit\) of a (\w+) model: ": r"\1 模型 QLoRA（4 位）：",
    r"^LoRA on ([\d,]+) examples: ": r"\1 条样本的 LoRA：",
    r"^LoRA of rank (\d+), effective batch (\d+), (\d+) epochs \(the guides’ (\w+)\)\.": (
        r"秩 \1 的 LoRA，有效批大小 \2，\3 轮（指南中的 \4）。"
    ),
    r"what (`sojourn demo`) trains on two CPU cores in about two minutes\.": r"\1 所训练的，两个 CPU 核约两分钟。",
    r"what (`sojourn demo --fast`) trains in about 20 seconds\.": r"\1 所训练的，约 20 秒。",
    r"does everything work here\? Seconds on any machine\.": "检查一切是否可用；任何机器上几秒钟。",
    r"a first model, on a laptop or any GPU\.": "第一个模型，笔记本或任何显卡都行。",
    r"(\d+) minutes on an (A100 40GB|RTX \d+)\.": r"在 \2 上 \1 分钟。",
    r"the guides’ first experiment, on a free Colab T4\.": "指南的第一个实验，免费的 Colab T4 即可。",
    r"the guides’ second experiment, on Kaggle\.": "指南的第二个实验，在 Kaggle 上。",
    r"the guides’ largest experiment, on Kaggle or AutoDL\.": "指南中最大的实验，在 Kaggle 或 AutoDL 上。",
    r"one RTX 3090 or 4090\.": "一张 RTX 3090 或 4090。",
    r"one H200, or several GPUs\.": "一张 H200，或多张显卡。",
}
_ALL: dict[str, _Replacement] = {**_OF_THE_BOARD, **_OF_SETTINGS, **_OF_PLANS, **_OF_PRESETS}
_PHRASES = [(re.compile(english), chinese) for english, chinese in _ALL.items()]


def in_chinese(message: str) -> str:
    for english, chinese in _PHRASES:
        message = english.sub(chinese, message)
    return message


def localized(message: str, language: str) -> str:
    """`language`: as in the header Accept-Language."""
    return in_chinese(message) if language.lower().startswith("zh") else message
