"""Errors and notes in Chinese, for pages in Chinese: phrases of which they are made, translated one by one.

Messages are written in English where they arise. Keys, commands, paths and names are the same in both languages; so is
a phrase that is not listed here.
"""

from __future__ import annotations

import re

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
_PHRASES = [(re.compile(english), chinese) for english, chinese in {**_OF_THE_BOARD, **_OF_SETTINGS}.items()]


def in_chinese(message: str) -> str:
    for english, chinese in _PHRASES:
        message = english.sub(chinese, message)
    return message


def localized(message: str, language: str) -> str:
    """`language`: as in the header Accept-Language."""
    return in_chinese(message) if language.lower().startswith("zh") else message
