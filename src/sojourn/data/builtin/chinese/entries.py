"""The Chinese words for encyclopaedia entries."""

from __future__ import annotations

from sojourn.data.builtin.kinds.entries import EntryWords
from sojourn.data.builtin.weave import options, plot

ENTRIES = EntryWords(
    name_parts=(
        "青白云石金银柳松梅兰竹桃清长安平永新古东南西北临望福宁",
        options("| 水 | 山 | 河 | 风 | 月 | 龙 | 花 | 沙 | 林"),
        "镇城县港桥湾岭坪渡屯",
    ),
    rivers=options("清河 | 白水河 | 柳江 | 沙河 | 月牙河 | 长溪 | 东江 | 石门河 | 青衣江"),
    lands=options("海边 | 丘陵之中 | 平原上 | 大山脚下 | 一座岛上 | 宽阔的山谷里 | 森林边上 | 两个湖之间"),
    sides="东南西北",
    goods=options(
        "羊毛 | 盐 | 玻璃 | 奶酪 | 纸 | 木船 | 铜铃 | 陶罐 | 蜂蜜 | 苹果 | 茶叶 | 钟表 | 绳子 | 家具 | 熏鱼 | 蜡烛"
    ),
    sights=options(
        """一座有{k}个桥洞的石桥 | 一座高{m}米的钟楼 | 一个藏书{k}千册的图书馆 | 一座建于{y2}年的市场 |
        一个种着{k}种玫瑰的花园 | 一所有{k}百名学生的学校 | 一座{k}公里外都能看见的灯塔 | 一个小小的{goods2}博物馆"""
    ),
    animal_facts={
        "beast": options("鹭 | 蜥蜴 | 田鼠 | 甲虫 | 狐 | 猫头鹰 | 水獭 | 蟾蜍 | 鹿 | 雀 | 蟹 | 蝙蝠 | 野兔"),
        "coat": options("灰色 | 沙色 | 条纹 | 黑色 | 花斑 | 银色 | 棕红色 | 淡绿色 | 褐色 | 白色"),
        "home": options("芦苇丛 | 干燥的山坡 | 老墙的缝隙 | 橡树林 | 河岸 | 高山草地 | 山洞 | 盐沼"),
        "stuff": options("草 | 泥 | 树枝 | 羽毛 | 树叶 | 黏土"),
        "food": options("种子 | 小鱼 | 甲虫 | 浆果 | 树根 | 蚯蚓 | 落果 | 苔藓 | 蜗牛 | 青草"),
    },
    habits=options(
        """整个冬天都在睡觉 | 黄昏时捕食 | 用{stuff}筑巢 | 秋天会变颜色 | 大约{k}只一群生活 | 能挖{m}米长的地道 |
        只在下雨前鸣叫 | 把幼崽背在背上 | {k}天不喝水也能活"""
    ),
    tools=(
        ("榨机", "榨油", "农夫"),
        ("锯", "锯薄木板", "木匠"),
        ("织机", "织毯子", "织工"),
        ("水泵", "提水", "园丁"),
        ("犁", "翻开硬土", "农夫"),
        ("船灯", "在海上照路", "水手"),
        ("秤", "称粮食", "磨坊主"),
        ("石钻", "在石头上打孔", "石匠"),
        ("绞盘", "把船拖上岸", "渔民"),
        ("筛子", "筛谷物", "面包师"),
        ("罗盘", "辨认方向", "测量员"),
        ("窑", "烧陶罐", "陶匠"),
    ),
    materials=options("橡木 | 铁 | 铜 | 竹子 | 黄铜 | 钢 | 青铜 | 松木 | 石头"),
    town=plot(
        """
        {town}位于{land}，在{other}以{side}{km}公里处。
        {town}坐落在{land}，离{other}大约{km}公里。
        {town}是{land}的一座小城。

        那里住着大约{people}人。
        全城有{people}名居民。
        最近一次统计，它有{people}人。

        它建于{year}年。
        它的名字最早见于{year}年的一封信。
        最老的房子建于{year}年。

        {river}从城中流过。
        它临着{river}，每年{month}涨水。
        -

        当地以{goods}闻名。
        人们靠{goods}为生。
        集市上卖{goods}。

        城里有{sight}和{sight2}。
        游客都来看{sight}。
        名胜之一是{sight}，此外还有{sight2}。

        每年{month}都有节日。
        每到{month}，{third}的人都来赶集。
        -

        最近的城镇是{other}，相距{km}公里。
        有一条{km}公里长的路通往{other}。
        -
        """
    ),
    animal=plot(
        """
        {town}{beast}是一种{coat}的动物，身长约{cm}厘米。
        {coat}的{town}{beast}生活在{home}。
        在{town}一带的{home}，可以见到{coat}的{beast}。

        它吃{food}。
        它的食物是{food}。
        它以{food}为食，{month}几乎只吃这些。

        它{habit}。
        它{habit}，这在同类中很少见。
        这种动物{habit}，而且{habit2}。

        雌兽在{month}生下{young}只幼崽。
        好的年份，{month}会有{young}只幼崽出生。
        -

        它能长到{cm}厘米，可以活{years}年。
        很少有活过{years}年的。
        -

        因为离不开{home}，它在{other}附近已经少见了。
        从{y2}年起，它在{other}受到保护。
        {other}的人说它会带来好运。
        -
        """
    ),
    tool=plot(
        """
        {town}{tool}是一种用{material}做的工具。
        {town}的{tool}远近闻名。
        {town}的{tool}由{material}和{material2}制成。

        {trade}用它来{use}。
        从{year}年起，{trade}就用它{use}。
        会用它的多半是{trade}，他们用它{use}。

        它有{parts}个零件，重{kg}公斤。
        它重约{kg}公斤。
        {parts}个零件不用一根钉子就能合在一起。

        第一件于{year}年在{town}做成，至今那里还在做。
        最老的一件做于{year}年，收藏在{other}。
        -

        {material}会磨损，所以每{years}年要换新的。
        爱惜着用，可以用{years}年。
        两个人可以用它干一整天，不用休息。
        -

        在{other}，常见的是小号的，只有{cm}厘米长。
        如今除了{other}，到处都改用机器了。
        -
        """
    ),
)
