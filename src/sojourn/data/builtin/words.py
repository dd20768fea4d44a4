"""The words that texts and tasks are made of, in English and Chinese."""

from __future__ import annotations

from typing import Literal

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


GIRLS = _split(
    "Lena Mia Nora Ada Ruth Clara Ines Maya Tessa Vera Alma Hana Zoe Edith Salma Irene Greta Paula Amara Lucy"
)
BOYS = _split(
    "Omar Ivo Sam Leo Finn Tom Hugo Nils Karim Pavel Anton Felix Dario Amir Jonas Oscar Victor Ravi Bruno Emil"
)
NAMES = GIRLS + BOYS

ADJECTIVES = _split(
    "red blue green white black brown yellow grey small large old new quiet warm cold bright dark soft round tall "
    "short quick slow clean sweet dry heavy light happy calm brave kind young silver golden wooden broken hidden "
    "empty gentle proud clever lazy hungry noisy narrow wide deep smooth rough sharp strong simple strange famous "
    "tiny fresh plain"
)
NOUNS = _split(
    "river lamp stone boat bird apple garden window door bridge road hill cloud sea island forest tree leaf flower "
    "bread cup table chair book letter song horse cat dog fish fox bear clock key coin map train ship tower house "
    "farm field market school teacher baker doctor sailor painter farmer pear plum onion carrot spoon plate knife "
    "kettle basket rope hammer nail ladder wheel cart mirror candle blanket pillow shirt coat hat shoe ring drum "
    "flute bell piano camera radio engine rocket planet star moon lake beach valley cave sand storm summer winter "
    "morning evening puzzle game story poem picture paper pencil brush desk shelf box bag bottle jar wall roof floor "
    "gate fence path street city village harbor station owl duck goose swan crow eagle wolf deer rabbit mouse frog "
    "snail bee spider whale seal crab lion camel goat sheep cow"
)
OBJECTS = _split(
    "lamp cup book letter clock key coin map spoon plate knife kettle basket rope hammer ladder wheel mirror candle "
    "blanket pillow shirt coat hat shoe ring drum flute bell camera radio pencil brush box bag bottle jar bucket "
    "umbrella scarf compass kite violin lantern whistle saddle net oar shovel needle puzzle picture stamp suitcase "
    "telescope teapot stool"
)
QUALITIES = _split(
    "red blue green white black brown yellow grey small large old new bright dark soft round heavy light silver "
    "golden wooden broken hidden empty narrow wide smooth rough strong simple strange famous tiny plain painted "
    "borrowed expensive cheap"
)
THINGS = _split(
    "pears plums apples onions carrots spoons plates cups keys coins maps books letters pencils brushes boxes "
    "bottles jars lamps candles hats shoes rings bells nails ropes baskets stones shells leaves flowers eggs tickets "
    "stamps buttons marbles"
)

NAMES_ZH = _split(
    "小明 小红 小华 小丽 小强 小芳 小军 小兰 小刚 小梅 阿宝 阿青 阿福 阿珍 大伟 晓雨 晓东 晓春 子涵 子轩 思远 雨晴 "
    "志成 文静"
)
ADJECTIVES_ZH = _split(
    "红色 蓝色 绿色 白色 黑色 黄色 灰色 古老 崭新 安静 温暖 寒冷 明亮 柔软 干净 香甜 干燥 沉重 轻巧 快乐 勇敢 善良 "
    "年轻 银色 金色 木头 破旧 神秘 空荡 温柔 聪明 热闹 狭窄 宽阔 光滑 粗糙 锋利 结实 简单 奇怪 有名 新鲜"
)
NOUNS_ZH = _split(
    "河流 台灯 石头 小船 小鸟 苹果 花园 窗户 大门 石桥 山路 山坡 白云 大海 小岛 森林 大树 树叶 花朵 面包 杯子 桌子 "
    "椅子 书本 信件 歌曲 马儿 小猫 小狗 金鱼 狐狸 黑熊 时钟 钥匙 硬币 地图 火车 轮船 高塔 房子 农场 田野 市场 学校 "
    "老师 医生 水手 画家 农夫 梨子 洋葱 勺子 盘子 水壶 篮子 绳子 锤子 梯子 车轮 镜子 蜡烛 毯子 枕头 衬衫 大衣 帽子 "
    "鞋子 戒指 铃铛 钢琴 相机 火箭 行星 星星 月亮 湖水 沙滩 山谷 山洞 风暴 夏天 冬天 早晨 夜晚 谜语 故事 诗歌 图画 "
    "铅笔 书架 箱子 瓶子 屋顶 栅栏 街道 城市 村庄 港口 车站 鸭子 天鹅 老鹰 小鹿 兔子 青蛙 蜗牛 蜜蜂 骆驼 山羊 奶牛"
)
OBJECTS_ZH = _split(
    "台灯 杯子 本子 闹钟 钥匙 硬币 勺子 盘子 水壶 篮子 锤子 梯子 镜子 毯子 枕头 帽子 戒指 小鼓 笛子 铃铛 相机 收音机 "
    "铅笔 刷子 箱子 书包 瓶子 罐子 水桶 围巾 指南针 风筝 灯笼 哨子 马鞍 船桨 铲子 凳子 望远镜 茶壶"
)
THINGS_ZH = _split(
    "梨 李子 苹果 洋葱 胡萝卜 勺子 盘子 杯子 钥匙 硬币 地图 书 信封 铅笔 刷子 盒子 瓶子 罐子 台灯 蜡烛 帽子 戒指 "
    "铃铛 钉子 篮子 石子 贝壳 鸡蛋 纽扣 玻璃球"
)

WEEKDAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WEEKDAYS_ZH = _split("星期一 星期二 星期三 星期四 星期五 星期六 星期日")
MONTHS = _split("January February March April May June July August September October November December")
MONTHS_ZH = _split("一月 二月 三月 四月 五月 六月 七月 八月 九月 十月 十一月 十二月")
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
