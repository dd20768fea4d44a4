"""The Chinese words for dialogues."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.kinds.talk import Deal, TalkWords
from sojourn.data.builtin.weave import beat, options, plot, plots
from sojourn.data.builtin.words import WEEKDAYS_ZH


def _deal(dice: Dice) -> Deal:
    day, day2 = dice.distinct(WEEKDAYS_ZH, 2)
    price = dice.between(4, 60)
    hour, later = dice.between(1, 9), dice.between(1, 3)
    have, more = dice.between(2, 40), dice.between(1, 30)
    return Deal(price, dice.between(2, price - 1), day, day2, hour, later, have, more)


TALK = TalkWords(
    places=options("码头 | 湖边 | 图书馆 | 车站 | 磨坊后面 | 学校门口 | 老城 | 集市 | 山上 | 家里"),
    reasons=options(
        """火车晚点了 | 我得帮妹妹的忙 | 店关门了 | 我找不到我的{thing}了 | 下了一整天雨 | 我看书看到半夜 | 桥封了 |
        我碰到一个老朋友"""
    ),
    work=options(
        "修{thing} | 学做饭 | 给门刷漆 | 读关于大海的书 | 训练一个小模型 | 做书架 | 写歌 | 数鸟 | 擦{thing} | 计划旅行"
    ),
    deal=_deal,
    opening=beat(
        """
        {a}：早上好，{b}！ / {b}：早上好！我刚才在{work}。
        {a}：{b}，最近好吗？ / {b}：挺好的，谢谢。我在{work}。
        {a}：你来啦，{b}。 / {b}：你好，{a}！等很久了吗？
        {a}：{b}，有空吗？ / {b}：当然有。
        {a}：{b}，你在干什么？ / {b}：我在{work}。
        """
    ),
    plots=plots(
        """
        {a}：这个{thing}多少钱？
        {a}：你的{thing}怎么卖？

        {b}：{price}元。
        {b}：给你算{price}元。
        {b}：{month}卖{price}元，今天也一样。

        {a}：我出{offer}元。
        {a}：太贵了，{offer}元行吗？

        {b}：{offer}元再加上你的{other}，就归你了。
        {b}：{offer}元只能买{other}，买不到{thing}。
        {b}：好吧，今天是{day}，{offer}元拿去吧。
        ===
        {a}：{day}我们几点见面？
        {a}：你说{day}要来，几点？

        {b}：{hour}点，在{place}。
        {b}：我想{hour}点在{place}。

        {a}：能晚{later}个小时吗？
        {a}：我要上班，晚{later}个小时行吗？

        {b}：那就{then}点，带上你的{thing}。
        {b}：{then}点吧，{c}也来。
        ===
        {a}：你有几个{things}？
        {a}：还有{things}吗？

        {b}：我原来有{have}个，{c}又给了我{more}个。
        {b}：盒子里有{have}个，桌上有{more}个。

        {a}：那一共是{sum}个。
        {a}：加起来是{sum}个。

        {b}：对，{sum}个，你要吗？
        {b}：没错，我只要{n}个。
        {b}：{sum}个，你算得真准。
        ===
        {a}：{day}你怎么没来{place}？
        {a}：{day}我们一直在等你。

        {b}：对不起，{reason}。
        {b}：说来你不信，{reason}。

        {a}：没关系。
        {a}：我们等了{n}分钟才走。
        {a}：下次给{c}打个电话。

        {b}：{day2}我一定来，还带上{thing}。
        {b}：以后不会了。
        """
    ),
    ending=plot(
        """
        {a}：谢谢你，{b}。
        {a}：{day2}见！
        {a}：好，我去告诉{c}。
        {a}：我记下来了。

        {b}：不客气。
        {b}：替我问{c}好！
        {b}：到时候见！
        -
        """
    ),
)
