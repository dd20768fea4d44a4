"""What Sojourn does, and the ideas of training, explained in Chinese with an example."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.weave import beat, plots, weave
from sojourn.data.builtin.words import NAMES_ZH, WEEKDAYS_ZH

_IDEAS = plots(
    """
    检查点是训练的存档。
    检查点是训练留在磁盘上的东西，有了它才能接着训练。

    里面有权重、优化器的状态和步数。
    没有优化器的状态，只能算半个检查点。

    {name}的训练每{k}步存一次。
    每{k}步存一次，在第{step}步崩溃最多损失{k}步。

    机器停在第{step}步，训练从第{kept}步继续。
    第{step}步中断之后，最近的好检查点是第{kept}步。

    没有写完的检查点不能用。
    读得回来的检查点才算数。
    -
    ===
    学习率就是一步的大小。
    每一步权重动多少，由学习率决定。

    太大，损失会乱跳；太小，几个小时都没有变化。
    用{lr}时损失下降，再大十倍就乱跳。

    开始时它在{warm}步内慢慢升高，这叫预热。
    {warm}步的预热保护还什么都不会的模型。

    然后它一直降到最后，所以最后几步很小。
    之后它沿着曲线降到接近零。

    {name}试了三个值，留下了{lr}。
    对{m}M参数的模型，{lr}是个好值。
    -
    ===
    梯度告诉每个权重，损失往哪个方向增大。
    梯度是一串斜率，每个权重一个。

    优化器朝相反的方向走。
    所以一步是往下坡走的。

    它由一批{batch}个样本算出。
    一批{batch}个样本时它有些抖动，样本多了就稳。

    如果它变得很长，就截到固定的长度，这叫裁剪。
    几个小批次可以加在一起，再走一步。

    {name}说，这就像在雾里下山。
    -
    ===
    损失是一个数，表示模型有多意外。
    在{vocab}个词元里瞎猜，损失大约是{guess}。

    到第{kept}步，{name}看到的是{loss}。
    它开始很高，到第{step}步是{loss}。

    只看训练数据上的损失，什么也证明不了。
    要看的是模型没有见过的文本上的损失。

    两者分开了，就是在死记硬背，这叫过拟合。
    只有一个在降，那么更多的数据比更多的步数有用。
    ===
    词元是一小段文字。
    模型读的不是字母，而是词元。
    训练之前，文字要切成词元。

    {vocab}个词元的分词器是从文本中学来的。
    用{vocab}个词元，一页大约有{page}个词元。

    常见的词是一个词元，少见的词是几个。
    数字一位一位分开，这样才能学会算术。

    训练时和以后的切法必须一样。
    {name}有一次换了分词器，得到的全是乱码。
    -
    ===
    适配器是放在冻结模型旁边的一小组权重。
    不必训练全部权重，可以只训练适配器。

    它只需要一小部分显存。
    {m}M权重里，它训练的不到百分之一。

    所以{name}用{gb}GB的显卡就能训练。
    这就是{gb}GB显存也够用的原因。

    以后可以并入模型，也可以分开放。
    几个适配器可以共用一个模型。
    """
)
_JOURNEY = plots(
    """
    {name}有一台笔记本，没有大显卡。
    {name}想要一个{m}M参数的模型，手里只有笔记本。

    先用`sojourn plan`，付钱之前就知道显存、时间和费用。
    `sojourn plan`说，{gb}GB显存、{hours}小时、{price}元就够了。

    然后用`sojourn prepare`在家里把文本变成词元，这时不计费。
    数据在家里用`sojourn prepare`准备好。

    `sojourn rehearse`用一分钟试了最长的一批。
    一分钟的预演证明训练能跑通。

    `sojourn train`跑了{hours}小时。
    {day}，`sojourn train`开始了。

    第{step}步断线了，同一条命令从第{kept}步继续。
    机器在第{step}步被收走，换一台又从第{kept}步继续。

    最后模型带回了家，可以回答问题。
    {price}元的预算没有超。
    -
    ===
    Sojourn的意思是短暂的停留。
    租来的电脑也是一次短暂的停留，Sojourn就是这个意思。

    它在按小时租来的显卡上训练和部署语言模型。
    它是为只租{hours}小时、不租一年的人做的。

    任何时刻中断都不怕。
    停下来的训练，存过的都不会丢。

    再运行一次`sojourn train`，就一位不差地继续。
    第二次`sojourn train`从第一次停下的地方继续。

    合上笔记本，{price}元的上限也会守住。
    预算{price}元，到了就自己保存、复制、停机。

    `sojourn doctor`指出机器的问题。
    `sojourn export`把结果变成别的程序能打开的文件。
    `sojourn board`在浏览器里显示曲线。
    ===
    {name}问，为什么不先租显卡。
    “为什么不马上租显卡？”{name}问。

    因为下载数据的时候也在计费。
    因为等{hours}小时和训练{hours}小时一样贵。

    所以处理器的活先做，显卡的活最后做。
    能在家做的就在家做。

    显存要先算好：权重、梯度、优化器、激活值。
    {m}M参数的计划里，列出了权重、梯度、优化器和激活值。

    一批{batch}行放不下，就拆成几份，结果一样。
    显存不够就把批次拆开，总和不变。

    这样{price}元就够了。
    {day}结账，一共{price}元。
    -
    """
)
_FRAME = beat(
    """
    {day}，{name}向{friend}请教训练的事。
    {name}已经训练了{hours}小时，{friend}给他讲解。
    {name}笔记本的第{page}页。
    {name}和{friend}在训练一个{m}M参数的模型。
    {day}，{name}读到这一段，发给了{friend}。
    干了{hours}小时，{name}写下有用的经验。
    """
)
_CLOSE = beat(
    """
    -
    -
    {friend}很赞同。
    {friend}打算{day}试一试。
    最初的{hours}小时，知道这些就够了。
    """
)
_GUESS = {512: "6.2", 1024: "6.9", 2048: "7.6", 4096: "8.3", 8192: "9.0", 32768: "10.4"}


def training(dice: Dice) -> str:
    every = dice.pick((20, 25, 40, 50, 100, 200, 250, 500))
    kept = every * dice.between(1, 90)
    vocab = dice.pick(tuple(_GUESS))
    name, friend = dice.distinct(NAMES_ZH, 2)
    told = dice.pick(_IDEAS if dice.chance(0.6) else _JOURNEY)
    return weave(
        dice,
        (_FRAME, *told, _CLOSE),
        {
            "name": name,
            "friend": friend,
            "day": dice.pick(WEEKDAYS_ZH),
            "k": every,
            "kept": kept,
            "vocab": vocab,
            "step": kept + dice.between(1, every - 1),
            "lr": f"0.00{dice.between(1, 99):02d}",
            "warm": dice.between(2, 50) * 10,
            "m": dice.between(1, 900),
            "batch": 2 ** dice.between(2, 9),
            "guess": _GUESS[vocab],
            "page": dice.between(300, 900),
            "loss": f"{dice.between(1, 5)}.{dice.between(0, 99):02d}",
            "gb": dice.pick((8, 12, 16, 24, 32, 48, 80)),
            "hours": dice.between(2, 60),
            "price": dice.between(5, 300),
        },
        "",
    )
