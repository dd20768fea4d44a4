"""How to do something, in Chinese: what is needed, the steps in order, what to watch for."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.weave import plot, weave
from sojourn.data.builtin.words import NAMES_ZH, WEEKDAYS_ZH

# A job: its name, what it needs, its steps in their order, what can go wrong and what then helps.
_JOBS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "烤面包",
        ("面粉", "水", "盐", "酵母"),
        ("把面粉和盐拌匀", "加入酵母和{n}杯温水", "揉{m}分钟", "盖上布，等它发起来", "烤到敲起来发空声"),
        ("面团粘手就加一点面粉", "发不起来，多半是屋里太冷"),
    ),
    (
        "种一棵小树",
        ("铁锹", "一桶水", "一根结实的棍子"),
        ("挖一个比树根宽一倍的坑", "把坑底的土松一松", "把树扶正", "填土并踩实", "每{n}天浇一次水"),
        ("叶子耷拉下来就是缺水了", "风把它吹弯了，就绑在棍子上"),
    ),
    (
        "补自行车胎",
        ("补丁", "胶水", "打气筒", "一盆水"),
        ("把轮子卸下来", "抽出内胎", "放进水里找到漏气的洞", "贴上补丁，等{m}分钟", "装回轮子，打足气"),
        ("还漏气就再找第二个洞", "补丁掉了，说明胶面是湿的"),
    ),
    (
        "泡一壶茶",
        ("茶叶", "干净的水", "茶壶"),
        ("把水烧开", "先烫一烫壶", "放{n}勺茶叶", "倒入热水", "等{n}分钟再倒出来"),
        ("太苦就少泡一会儿", "太淡就多放点茶叶"),
    ),
    (
        "给朋友写信",
        ("纸", "笔", "邮票"),
        ("想好最想说的一件事", "在上面写上日期", "先问候一句", "分{n}小段讲讲近况", "签上名，封好信封"),
        ("不知道怎么开头，就从天气写起", "写得太长，就删去朋友已经知道的事"),
    ),
    (
        "做一个鸟窝",
        ("木板", "钉子", "锤子", "锯"),
        ("把木板锯成{n}块", "在前面开一个圆洞", "把四边钉在一起", "最后装上屋顶", "挂在离地{n}米的地方"),
        ("没有鸟来，就换个背风的方向", "木头裂了，就先钻孔再钉"),
    ),
    (
        "备份照片",
        ("第二块硬盘", "一个安静的小时"),
        (
            "把照片放进同一个文件夹",
            "整个复制到第二块硬盘",
            "比较文件的数目",
            "打开{n}张看看是否完整",
            "把硬盘放到另一个房间",
        ),
        ("数目不同就再复制一次", "硬盘满了，就删掉重复的"),
    ),
    (
        "训练一个小语言模型",
        ("一些文本", "一台电脑", "一个计划"),
        (
            "数一数文本，定下模型的大小",
            "把文本切成词元",
            "训练{n}00步，看着损失下降",
            "每{n}分钟存一个检查点",
            "问它没有见过的问题",
        ),
        ("损失突然跳高，就降低学习率", "只会背例子，就需要更多数据"),
    ),
    (
        "按小时租电脑",
        ("预算", "一张需求清单"),
        (
            "在家里把一切准备好",
            "按需要的显存比较价格",
            "正式开始前先试一分钟",
            "设好{m}元的上限",
            "离开之前把结果带回家",
        ),
        ("连接断了，工作也要能自己继续", "磁盘最后会被清空，所以要先复制"),
    ),
    (
        "看地图",
        ("地图", "指南针"),
        (
            "找到自己所在的地方",
            "转动地图，让北对着北",
            "选好目标，量一量路程",
            "记住路上的{n}个标志",
            "每到一个就核对一次",
        ),
        ("少了一个标志，就退回上一个", "起雾了，就不要离开小路"),
    ),
)
_ORDER = (
    ("首先", "然后", "接着", "再", "最后"),
    ("1.", "2.", "3.", "4.", "5."),
    ("第一步", "第二步", "第三步", "第四步", "第五步"),
)
_OPENING = plot(
    """
    怎样{job}？
    {name}想学会{job}。
    谁都可以学会{job}。
    上个{day}，{name}教我们{job}。
    {name}喜欢这样{job}。

    你需要{needs}。
    准备好{needs}。
    开始之前，先把{needs}放在手边。
    只要有{needs}就够了。

    大约要{m}分钟。
    留出{m}分钟。
    第一次做可能要{m}分钟。
    -
    """
)
_CLOSING = plot(
    """
    {watch}。
    还有一点：{watch}。
    {name}补充说：{watch}。

    做过{times}次就熟了。
    不要着急。
    {name}已经做过{times}次了。
    可以在{day}练习。
    -
    """
)


def how_to(dice: Dice) -> str:
    job, needs, steps, watch = dice.pick(_JOBS)
    facts = {
        "job": job,
        "name": dice.pick(NAMES_ZH),
        "needs": "、".join(needs),
        "day": dice.pick(WEEKDAYS_ZH),
        "m": dice.between(5, 60),
        "n": dice.between(2, 9),
        "times": dice.between(2, 20),
        "watch": dice.pick(watch),
    }
    opening = weave(dice, _OPENING, facts, "")
    words = dice.pick(_ORDER)
    if words[0] == "1.":
        body = "\n" + "\n".join(f"{word} {step}。" for word, step in zip(words, steps, strict=True)) + "\n"
    else:
        body = "".join(f"{word}，{step}。" for word, step in zip(words, steps, strict=True))
    return opening + body.format_map(facts) + weave(dice, _CLOSING, facts, "")
