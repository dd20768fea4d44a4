"""The Chinese words for little stories."""

from __future__ import annotations

from sojourn.data.builtin.dice import Dice
from sojourn.data.builtin.kinds.stories import StoryWords
from sojourn.data.builtin.weave import beat, options, plots
from sojourn.data.builtin.words import NAMES_ZH, WEEKDAYS_ZH


def _people(dice: Dice) -> dict[str, str]:
    hero, friend = dice.distinct(NAMES_ZH, 2)
    return {"hero": hero, "friend": friend}


STORIES = StoryWords(
    weather=(
        ("下着雨", "小路很泥泞", "穿上了雨靴"),
        ("下着雪", "台阶很滑", "走得很慢"),
        ("太阳很毒", "井水快干了", "多带了一壶水"),
        ("风刮得很大", "船都不能出海", "躲在墙后等着"),
        ("起了大雾", "谁也看不清路牌", "沿着栅栏走"),
        ("夜里很冷", "池塘结了冰", "围上了围巾"),
        ("云压得很低", "衣服晒不干", "带上了一盏灯"),
        ("天气晴朗", "村里一半的人都在外面", "早早出了门"),
    ),
    places=options(
        "码头 | 磨坊 | 石桥边 | 集市 | 灯塔 | 学校 | 湖边 | 车站 | 果园 | 图书馆 | 北门 | 面包店 | 钟楼 | 河岸 | 山顶"
    ),
    details={
        "ta": "他她",
        "job": options(
            "面包师 | 水手 | 老师 | 园丁 | 木匠 | 牧羊人 | 裁缝 | 画家 | 医生 | 工程师 | 渔夫 | 养蜂人 | 陶匠"
        ),
        "day": WEEKDAYS_ZH,
        "lesson": options(
            """每天走一小步，胜过一次跳很远 | 付钱之前先看清价格 | 写下来的东西不会丢 | 重箱子两个人抬才轻松 |
            好的计划要给坏天气留余地 | 早点问人比事后修补便宜 | 学新路永远不晚 | 检查两遍的人只走一趟"""
        ),
        "feeling": options(
            "很高兴 | 很自豪 | 又累又满足 | 松了一口气 | 有点惊讶 | 有点不好意思 | 心里平静了 | 充满好奇"
        ),
        "sound": options("铃声 | 狗叫 | 有人唱歌 | 脚步声 | 马车声 | 猫头鹰的叫声 | 哨声 | 雷声"),
        "built": options(
            """一座戏台 | 一扇新门 | 一只木筏 | 一张长桌 | 一座石炉 | 一架秋千 | 一座小桥 | 一只大风筝 | 一座小塔 |
            一架雪橇 | 一座喷泉"""
        ),
    },
    people=_people,
    opening=beat(
        """
        {day}，{hero}动身去{place}。
        {hero}是一位{job}，住在{place}附近。
        {day}早上，{hero}醒来，听见了{sound}。
        {hero}和{friend}做了{n}年的朋友。
        从前有个叫{hero}的{job}，今年{age}岁。
        {place}一带，没有人比{hero}更熟悉{thing}了。
        """
    ),
    plots=plots(
        """
        @sky

        {ta}在找一个丢在{other_place}的{thing}。
        {ta}的{thing}不见了，到处都找过了。

        {ta}问{friend}，可{friend}只见过一个{other}。
        “你见过我的{thing}吗？”“没有，”{friend}说，“不过我捡到一个{other}。”

        他们一起在{other_place}找了{n}个小时。
        他们把每块石头下面都看了一遍。

        最后，{thing}在{other}后面找到了，是风把它吹过去的。
        原来它就在{hero}{day}坐过的地方，是{ta}自己忘了。
        ===
        {ta}想给{friend}买一个{thing}。
        集市上有一个漂亮的{thing}，{hero}很喜欢。

        它要{price}元，可{ta}只有{paid}元。
        价钱是{price}元，{ta}口袋里有{paid}元。

        还差{rest}元。
        也就是说，还少{rest}元。

        @sky

        {ta}在{place}帮{job}干了{n}天活，挣够了钱。
        {friend}借给{ta}{rest}元，只要{ta}说真话。
        卖东西的人笑了，剩下的用一个{other}来抵。

        {thing}终于归{ta}了。
        {day}，{thing}被带回了家。
        ===
        @sky

        路过{other_place}时，{ta}听见了{sound}。
        走到{other_place}，{ta}听见了{sound}。

        原来是{friend}，脚受了伤，走不动了。
        {friend}站在那里，手里的{thing}太重了。

        {hero}没有犹豫。
        “等一下，我来帮你。”{hero}说。
        {hero}起初有点害怕，后来还是走了过去。

        {ta}从{place}拿来一个{other}，事情就好办了。
        {ta}用绳子和{thing}做了一个座位。

        {n}分钟后，他们继续上路了。
        不到{n}点，他们就到家了。
        ===
        每年过节，大家都要造{built}。
        {job}答应在{day}之前造好{built}。

        这一次由{hero}来带头。
        {hero}以前从来没有做过。

        {ta}列了{n}件要做的事，先从最难的开始。
        {ta}先在纸上画好，再数钉子。

        @sky

        第三天它倒了，因为地太软。
        后来一根梁断了，因为没有人量过。

        {hero}没有从头再来，好的部分都留着。
        做好的部分都存放在{place}，所以只耽误了一天。
        {friend}拿来一根更结实的梁，他们从停下的地方接着干。

        {day}，它终于立起来了。
        到了{day}，一切都准备好了。
        ===
        {friend}说，{thing}总比{other}有用。
        两个人争论该由谁来拿{thing}。

        {hero}不同意。
        “不一定。”{hero}说。
        {hero}摇了摇头。

        于是他们去{place}请教一位{job}。
        最后他们去问{age}岁的{job}。

        @sky

        “看情况，”回答是，“在{place}用{thing}，在路上用{other}。”
        “两样都试{n}天，”回答是，“然后数一数。”

        两个人都笑了，因为都说对了。
        {friend}想了{n}分钟，点了点头。
        """,
        sky=beat(
            """
            那天{weather}，{trouble}，所以{ta}{answer}。
            因为{weather}，{trouble}。
            外面{weather}，于是{ta}{answer}。
            -
            """
        ),
    ),
    ending=beat(
        """
        {hero}回到家，{feeling}。
        晚上，{hero}在本子上写道：{lesson}。
        “你看，”{friend}说，“{lesson}。”
        从那以后，{hero}每个{day}都去{place}。
        大家一起喝了汤，{hero}{feeling}。
        {hero}明白了：{lesson}。
        """
    ),
)
