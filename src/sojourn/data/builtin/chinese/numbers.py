"""The Chinese words for facts about numbers."""

from __future__ import annotations

from sojourn.data.builtin.kinds.numbers import NumberWords
from sojourn.data.builtin.weave import plot

NUMBERS = NumberWords(
    even="偶数",
    odd="奇数",
    plot=plot(
        """
        来看{a}这个数。
        {name}喜欢{a}这个数。
        {name}在黑板上写下{a}。
        想一个数，比如{a}。

        它是{parity}。
        {a}是{parity}，{a2}也是。
        {a}后面是{next}，前面是{last}。

        {a}加{b}等于{plus}。
        再加上{b}，就是{plus}。
        {a}个{things}，再来{b}个，就有{plus}个。

        {a}减{b}等于{minus}。
        从{b}到{a}差{minus}。
        -

        {a}的两倍是{double}。
        两个{a}是{double}。
        {double}的一半是{a}。
        -

        {a}比{b}大。
        {b}比{a}小。
        {b}乘{c}等于{times}。
        {times}除以{b}等于{c}。
        {c}排{things}，每排{b}个，一共{times}个。

        {a}的各位数字加起来是{digits}。
        {a}倒着写是{back}。
        {a}是{length}位数。
        -

        关于它，{name}就说这些。
        {name}用{things}验算过。
        数字说话算数。
        -
        """
    ),
)
