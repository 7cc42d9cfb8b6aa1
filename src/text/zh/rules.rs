//! The rules of Chinese.

use regex::Captures;

use super::numbers::{Chinese, counted, digits, phone, quantity};
use super::tables::{AFTER_CALLS, CALLS, CODES, COUNTERS, CURRENCIES, NAMED, SERVICES, TEAMS};
use crate::text::characters::{
    self, Characters as _, NUMBER as N, date, full_dates, link, loose, minus, number, partial_dates, rule, sum,
};
use crate::text::scan::{Context, Rule};

const CURRENCY: &str = r"(?:US\$|AU?\$|CA?\$|HK\$|N[ZT]\$|S\$|[$￥¥€£₩₽₹]|USD|CNY|RMB|HKD|AUD|CAD|EUR|GBP|JPY|KRW|CHF|SGD|TWD|MOP|NZD|RUB|INR|THB)";
const UNIT: &str = r"(?:[°º] ?[CF]|[℃℉°ºΩ㎡㎏㎝㎜㎞㎥]|[A-Za-zμ]{1,4})";
const RANGE: &str = Chinese::RANGE;

/// What begins with a digit, a sign or a currency.
pub(super) fn numbers(rules: &mut Vec<Rule>) {
    codes(rules);
    dates(rules);
    times(rules);
    measures(rules);
    sums(rules);
    bare(rules);
}

/// What begins with a letter or a character.
pub(super) fn words(rules: &mut Vec<Rule>) {
    link::<Chinese>(rules);
    loose(rules, r"([公西]元前?)(\d{1,4})年", |c, _| Some(format!("{}{}年", &c[1], digits(&c[2]))));
    characters::roman::<Chinese>(rules);
    rule(rules, r"H2O", |_, _| Some("H二O".into()));
    // Days of the week, and from one to another.
    loose(
        rules,
        // "周三到一家店": behind a word the second day is named in full.
        r"(周|星期|礼拜)([1-7一二三四五六日天])(?: ?[-~～—–] ?(?:周|星期|礼拜)?|[至到](?:周|星期|礼拜))([1-7一二三四五六日天])",
        |c, context| {
            // "周1-2次": so many times a week.
            let counts = c[3].starts_with(|c: char| c.is_ascii_digit())
                && COUNTERS.iter().any(|word| context.after.starts_with(word));
            (!counts).then(|| format!("{}{}到{}{}", &c[1], weekday(&c[2]), &c[1], weekday(&c[3])))
        },
    );
    // Numbers of accounts.
    rule(rules, r"(QQ|qq|VX|vx|UID|ID|PIN)(群|号)?([:：是为]? ?)(\d{4,20})", |c, _| {
        let of = c.get(2).map_or("", |of| of.as_str());
        Some(format!("{}{of}{}{}", &c[1], &c[3], digits(&c[4])))
    });
    // A door behind its staircase or house.
    loose(rules, r"(单元|号楼|栋|幢)(\d{3,4})", |c, context| {
        let counted =
            context.next().is_some_and(|next| next.is_ascii_digit() || matches!(next, '年' | '个' | '户' | '人'));
        (!counted).then(|| format!("{}{}", &c[1], digits(&c[2])))
    });
    // Flights, trains, aeroplanes: "CA1234", "C919".
    rule(rules, r"([A-Z]{1,2})(\d{3,4})", |c, context| {
        let train = context.after.starts_with('次');
        let aeroplane = c[2].len() == 3 || c[1].len() == 2;
        let counts = !train && COUNTERS.iter().any(|word| context.after.starts_with(word));
        let said = if train { phone(&c[2]) } else { digits(&c[2]) };
        (!counts && (train || aeroplane)).then(|| format!("{}{said}", &c[1]))
    });
    rule(rules, r"([A-Z])2([A-Z])", |c, _| Some(format!("{} to {}", &c[1], &c[2])));
    money(rules);
    // Plates: the province, a letter, five or six of digits and letters.
    loose(
        rules,
        r"([京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼])([A-Z])([·• ]?)([A-Z0-9]{5,6})",
        |c, context| {
            let plate = c[4].contains(|c: char| c.is_ascii_digit())
                && !context.next().is_some_and(|c| c.is_ascii_alphanumeric());
            let said = |c: char| if c.is_ascii_digit() { phone(&c.to_string()) } else { c.to_string() };
            plate.then(|| format!("{}{}{}", &c[1], &c[2], c[4].chars().map(said).collect::<String>()))
        },
    );
    loose(rules, &format!(r"(第)(\d{{1,9}}){RANGE}第?(\d{{1,9}})"), |c, _| {
        Some(format!("第{}到第{}", quantity(&c[2]), quantity(&c[3])))
    });
    // "订单号A123456"; so many digits behind letters are one anyway.
    rule(rules, r"([A-Z]{1,4})(\d{3,20})", |c, context| {
        (c[2].len() > 4 || ends_with_any(context.before, CODES)).then(|| format!("{}{}", &c[1], digits(&c[2])))
    });
    rule(rules, r"([A-Za-z])(?:[²2]的平方|²|\^2)", |c, _| Some(format!("{}的平方", &c[1])));
    rule(rules, r"([A-Za-z])(?:³|\^3)", |c, _| Some(format!("{}的立方", &c[1])));
    rule(rules, r"([A-Za-z])\^(\d{1,3})", |c, _| Some(format!("{}的{}次方", &c[1], quantity(&c[2]))));
    loose(rules, r"(第)(\d{1,9})", |c, _| Some(format!("{}{}", &c[1], quantity(&c[2]))));
    rule(rules, r"([A-Za-z]{2,})-(\d{1,3})", |c, _| Some(format!("{}{}", &c[1], quantity(&c[2]))));
}

/// The first day of a week is a Monday.
fn weekday(day: &str) -> String {
    if day == "7" {
        "日".into()
    } else {
        day.chars().map(|c| if c.is_ascii_digit() { digits(&c.to_string()) } else { c.into() }).collect()
    }
}

fn ends_with_any(text: &str, words: &[&str]) -> bool {
    let text = text.trim_end_matches([' ', '：', ':']);
    words.iter().any(|word| text.ends_with(word))
}

fn codes(rules: &mut Vec<Rule>) {
    link::<Chinese>(rules);
    characters::internet_address::<Chinese>(rules);
    rule(rules, r"(?:\+?(86)[- ]?)?(1[3-9]\d)[- ]?(\d{4})[- ]?(\d{4})", |c, _| {
        let country = c.get(1).map(|_| "加八六 ").unwrap_or_default();
        Some(format!("{country}{}{}{}", phone(&c[2]), phone(&c[3]), phone(&c[4])))
    });
    rule(rules, r"(0\d{2,3})-(\d{7,8})", |c, _| Some(format!("{}{}", digits(&c[1]), digits(&c[2]))));
    rule(rules, r"([48]00)-?(\d{3})-?(\d{4})", |c, _| {
        Some(format!("{}{}{}", digits(&c[1]), digits(&c[2]), digits(&c[3])))
    });
    // Numbers of services.
    rule(rules, r"(?:11[0249]|12[02]|911)", |c, context| {
        let alone = context.before.trim().is_empty() && context.after.trim().is_empty();
        let called = AFTER_CALLS.iter().any(|word| context.after.starts_with(word));
        (alone || called || ends_with_any(context.before, CALLS)).then(|| phone(&c[0]))
    });
    rule(rules, r"(?:1[02]\d{3}|9[56]\d{3})", |c, context| {
        let counts = COUNTERS.iter().any(|word| context.after.starts_with(word));
        let known = c[0].starts_with('9') || SERVICES.contains(&&c[0]);
        let alone = context.before.trim().is_empty() && !counts && known;
        let called = AFTER_CALLS.iter().any(|word| context.after.starts_with(word));
        (ends_with_any(context.before, CALLS) || called || alone).then(|| phone(&c[0]))
    });
    // Years, projects and days that are known by their digits.
    rule(rules, r"(911|985|211|618|315|404|996|007)|(\d{1,2})[·.](\d{1,2})", |c, context| {
        NAMED.iter().any(|word| context.after.starts_with(word)).then_some(())?;
        Some(match (c.get(1), &c.get(2)) {
            (Some(known), _) => digits(known.as_str()),
            // "10.1国庆" is the first of the tenth; the others are read digit by digit.
            (_, Some(month)) if month.as_str() == "10" => format!("十{}", digits(&c[3])),
            _ => format!("{}{}", digits(&c[2]), digits(&c[3])),
        })
    });
    // Days that are known by their digits, whatever follows: "9·11".
    rule(rules, r"(\d{1,2})·(\d{1,2})", |c, context| {
        let joined =
            context.last().is_some_and(|last| last.is_ascii_digit() || last == '·') || context.next() == Some('·');
        (!joined && number(&c[1]) <= 12 && number(&c[2]) <= 31).then(|| match &c[1] {
            "10" => format!("十{}", digits(&c[2])),
            month => format!("{}{}", digits(month), digits(&c[2])),
        })
    });
    // "99元/月"
    loose(rules, "/(月|年|天|日|周|人|次|小时|晚|斤|件|位|个|张|台)", |c, context| {
        let counted = context.last().is_some_and(|last| last.is_alphanumeric());
        let priced = context.before.ends_with(['元', '块']) || context.before.contains(['¥', '￥', '$', '€', '£']);
        (counted && priced).then(|| format!("每{}", &c[1]))
    });
    loose(rules, "[①-⑳]", |c, _| {
        let n = c[0].chars().next()? as u128 - '①' as u128 + 1;
        Some(super::numbers::cardinal(n))
    });
    loose(rules, "[<>]", |c, context| {
        let word = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let sides =
            word(context.before.trim_end().chars().next_back()) && word(context.after.trim_start().chars().next());
        // "a<b>c" is markup.
        let markup = context.after.contains('>') || context.before.contains('<');
        (sides && !markup).then(|| if &c[0] == "<" { "小于" } else { "大于" }.into())
    });
    // Rooms and what is seen in so many lines.
    loose(rules, r"(\d{3,4})(室|房间|号房)", |c, _| Some(format!("{}{}", digits(&c[1]), &c[2])));
    loose(rules, r"(480|720|1080|1440|2160)([pP])", |c, context| {
        (!context.next().is_some_and(|next| next.is_ascii_alphanumeric()))
            .then(|| format!("{}{}", digits(&c[1]), &c[2]))
    });
    rule(rules, r"(?:24[/*×x]7|7[/*×x]24)", |_, context| {
        Some(if context.after.starts_with("小时") { "七乘二十四" } else { "七乘二十四小时" }.into())
    });
    rule(rules, r"\d{3,30}", |c, context| {
        if !ends_with_any(context.before, CODES) {
            return None;
        }
        let phoned = context.before.ends_with("尾号");
        Some(if phoned { phone(&c[0]) } else { digits(&c[0]) })
    });
    // "90后"
    rule(rules, r"([05-9][05])后", |c, _| Some(format!("{}后", digits(&c[1]))));
}

fn dates(rules: &mut Vec<Rule>) {
    full_dates::<Chinese>(rules);
    characters::short_dates::<Chinese>(rules);
    // "208bc"
    loose(rules, r"(\d{1,4}) ?(?i:(b)\.?c|a\.?d)\b\.?", |c, _| {
        Some(format!("公元{}{}年", if c.get(2).is_some() { "前" } else { "" }, digits(&c[1])))
    });
    rule(rules, r"(\d{1,2})([-/.])(\d{1,2})([-/.])(\d{4})", |c, _| {
        (c[2] == c[4]).then(|| date::<Chinese>(Some(&c[5]), &c[1], Some(&c[3]))).flatten()
    });
    rule(
        rules,
        &format!(r"((?:19|20)\d{{2}})[-/.](0?[1-9]|1[0-2]) ?{RANGE} ?((?:19|20)\d{{2}})[-/.](0?[1-9]|1[0-2])"),
        |c, _| {
            Some(format!(
                "{}到{}",
                date::<Chinese>(Some(&c[1]), &c[2], None)?,
                date::<Chinese>(Some(&c[3]), &c[4], None)?
            ))
        },
    );
    partial_dates::<Chinese>(rules);
    loose(rules, r"((?:19|20)\d{2})年?Q([1-4])", |c, _| Some(format!("{}年第{}季度", digits(&c[1]), digits(&c[2]))));
    // A season, a school year: "2024/25赛季".
    loose(rules, r"((?:19|20)\d{2})[-/–](\d{2}|(?:19|20)\d{2})(赛季|学年|财年|年度)", |c, _| {
        Some(format!("{}到{}{}", digits(&c[1]), digits(&c[2]), &c[3]))
    });
    // Years of four digits, and of two before a month.
    loose(rules, &format!(r"(\d{{4}}){RANGE}(\d{{4}})年"), |c, _| {
        Some(format!("{}到{}年", digits(&c[1]), digits(&c[2])))
    });
    loose(rules, r"((?:1\d|20|21)\d{2})( ?年)", |c, context| {
        let span = ["前", "后", "历史", "以来", "的历史"].iter().any(|word| context.after.starts_with(word))
            && &c[1][2..] == "00";
        (!span).then(|| format!("{}年", digits(&c[1])))
    });
    loose(rules, r"(0\d|[5-9]\d)年(\d{1,2})月", |c, _| {
        Some(format!("{}年{}月", digits(&c[1]), quantity(c[2].trim_start_matches('0'))))
    });
    loose(rules, r"0(\d)([月日号时点分])", |c, _| {
        Some(format!("{}{}", if &c[2] == "分" { format!("零{}", digits(&c[1])) } else { digits(&c[1]) }, &c[2]))
    });
}

fn clock(hour: &str, minute: &str, second: Option<&str>) -> Option<String> {
    let (h, m) = (number(hour), number(minute));
    (h <= 24 && m < 60).then_some(())?;
    let two = |text: &str| match text.strip_prefix('0') {
        Some("0") => "零".to_owned(),
        Some(one) => format!("零{}", digits(one)),
        None => quantity(text),
    };
    let hour = if h == 2 { "两".to_owned() } else { super::numbers::cardinal(h) };
    let mut said = format!("{hour}点");
    match second {
        Some(second) => said.push_str(&format!("{}分{}秒", two(minute), two(second))),
        None if m == 0 => {}
        None => said.push_str(&format!("{}分", two(minute))),
    }
    Some(said)
}

fn half(text: Option<&str>) -> &'static str {
    match text {
        None => "",
        Some(text) if text.starts_with(['a', 'A']) => "上午",
        Some(_) => "下午",
    }
}

fn times(rules: &mut Vec<Rule>) {
    rule(
        rules,
        &format!(r"(\d{{1,2}}):(\d{{2}})(?::(\d{{2}}))? ?{RANGE} ?(\d{{1,2}}):(\d{{2}})(?::(\d{{2}}))?"),
        |c, _| {
            let from = clock(&c[1], &c[2], c.get(3).map(|second| second.as_str()))?;
            Some(format!("{from}到{}", clock(&c[4], &c[5], c.get(6).map(|second| second.as_str()))?))
        },
    );
    rule(rules, r"(\d{1,2}):(\d{2})(?::(\d{2}))?(?: ?(?i:([ap]\.?m)\b\.?))?", |c, context| {
        if ends_with_any(context.before, TEAMS) || ends_with_any(context.before, &["比分定格在", "以"]) {
            return None;
        }
        let said = clock(&c[1], &c[2], c.get(3).map(|second| second.as_str()))?;
        Some(format!("{}{said}", half(c.get(4).map(|half| half.as_str()))))
    });
    rule(rules, r"(\d{1,2}) ?(?i:([ap]\.?m)\b\.?)", |c, _| {
        let hour = clock(&c[1], "00", None)?;
        Some(format!("{}{hour}", half(Some(&c[2]))))
    });
    // Scores and shares.
    loose(rules, r"\d{1,4}(?:[:∶]\d{1,4}){2,5}", |c, _| {
        Some(c[0].split([':', '∶']).map(quantity).collect::<Vec<_>>().join("比"))
    });
    rule(rules, r"(\d{1,4}) ?[:∶] ?(\d{1,4})", |c, _| Some(format!("{}比{}", quantity(&c[1]), quantity(&c[2]))));
    rule(rules, r"(\d{1,3})[-–/](\d{1,3})", |c, context| {
        let before = context.before.trim_end_matches([' ', '队']);
        ends_with_any(before, TEAMS).then(|| format!("{}比{}", quantity(&c[1]), quantity(&c[2])))
    });
}

fn currency(sign: &str) -> Option<&'static str> {
    CURRENCIES.iter().find(|(known, _)| *known == sign).map(|(_, name)| *name)
}

fn money(rules: &mut Vec<Rule>) {
    rule(rules, &format!(r"({CURRENCY}) ?({N})(?:{RANGE}({N}))?([百千万亿]{{0,2}})(?:元|块)?"), |c, _| {
        let to = c.get(3).map(|to| format!("到{}", counted_or(to.as_str(), !c[4].is_empty()))).unwrap_or_default();
        // "￥5元" says it twice.
        Some(format!("{}{to}{}{}", counted_or(rounded(&c[2]), !c[4].is_empty()), &c[4], currency(&c[1])?))
    });
}

fn counted_or(text: &str, counted_by: bool) -> String {
    if counted_by { counted(text) } else { quantity(text) }
}

fn measures(rules: &mut Vec<Rule>) {
    money(rules);
    characters::mixed::<Chinese>(rules);
    // How tall: "1米75".
    loose(rules, r"([12])米(\d{2})", |c, context| {
        (!context.next().is_some_and(|next| next.is_ascii_digit() || next == '米'))
            .then(|| format!("{}米{}", counted(&c[1]), digits(&c[2])))
    });
    rule(rules, &format!(r"({N})([百千万亿]{{0,2}})({CURRENCY})"), |c, _| {
        Some(format!("{}{}{}", counted_or(rounded(&c[1]), !c[2].is_empty()), &c[2], currency(&c[3])?))
    });
    // A span with the measure at both ends.
    loose(rules, &format!(r"([-−]?)({N}) ?({UNIT}) ?{RANGE} ?([-−]?)({N}) ?({UNIT})"), |c, context| {
        if context.next().is_some_and(|next| next.is_ascii_alphanumeric() || matches!(next, '²' | '³' | '/')) {
            return None;
        }
        let (from, to) = (unit(&c[3], None)?, unit(&c[6], None)?);
        let one = |sign: &str, number: &str| format!("{}{}", minus::<Chinese>(sign), quantity(number));
        Some(format!("{}{from}到{}{to}", one(&c[1], &c[2]), one(&c[4], &c[5])))
    });
    // Sides: "10cm×20cm".
    rule(rules, &format!(r"({N}) ?({UNIT}) ?[×xX*] ?({N}) ?({UNIT})(?: ?[×xX*] ?({N}) ?({UNIT}))?"), |c, _| {
        let side = |number: usize| Some(format!("{}{}", quantity(&c[number]), unit(&c[number + 1], None)?));
        let mut said = format!("{}乘{}", side(1)?, side(3)?);
        if c.get(5).is_some() {
            said.push_str(&format!("乘{}", side(5)?));
        }
        Some(said)
    });
    rule(rules, &format!(r"√({N})"), |c, _| Some(format!("根号{}", quantity(&c[1]))));
    // Shares of a hundred and of a thousand.
    rule(rules, &format!(r"([-−]?)({N})[%％]? ?{RANGE} ?({N}) ?([%％‰])"), |c, _| {
        Some(format!(
            "{}{}{}到{}{}",
            share(&c[4]),
            minus::<Chinese>(&c[1]),
            quantity(&c[2]),
            share(&c[4]),
            quantity(&c[3])
        ))
    });
    loose(rules, r"[-−](百|千)分之", |c, _| Some(format!("负{}分之", &c[1])));
    rule(rules, &format!(r"([-−]?)({N}) ?([%％‰])"), |c, _| {
        Some(format!("{}{}{}", share(&c[3]), minus::<Chinese>(&c[1]), quantity(&c[2])))
    });
    rule(rules, &format!(r"(-?)(\d{{1,9}}) ?/ ?(\d{{1,9}}) ?({UNIT})"), |c, _| {
        let unit = unit(&c[4], None)?;
        Some(format!("{}{}分之{}{unit}", minus::<Chinese>(&c[1]), quantity(&c[3]), quantity(&c[2])))
    });
    rule(rules, r"(\d{2,5})[x×*](\d{2,5})", |c, _| Some(format!("{}乘{}", quantity(&c[1]), quantity(&c[2]))));
    rule(rules, r"(-?)(\d{1,9}) ?/ ?(\d{1,9})", |c, _| {
        Some(format!("{}{}分之{}", minus::<Chinese>(&c[1]), quantity(&c[3]), quantity(&c[2])))
    });
    loose(
        rules,
        &format!(r"([-−]?)({N})(?: ?{RANGE} ?({N}))?( ?)({UNIT})([²³23])?(?:/({UNIT}))?"),
        |c, context| {
            let to = match c.get(3) {
                Some(to) => format!("到{}", quantity(to.as_str())),
                None => String::new(),
            };
            if context.next().is_some_and(|next| next.is_ascii_alphanumeric()) {
                return None;
            }
            let (sign, alone) = (&c[5], c.get(6).is_none() && c.get(7).is_none());
            // Ten thousand, before what is counted.
            if matches!(sign, "w" | "W") && alone && context.next().is_some_and(|next| !next.is_ascii()) {
                return Some(format!("{}{to}万", quantity(&c[2])));
            }
            // "A5 h", "3 t" in a sentence of letters are no measures.
            let unit = unit(sign, c.get(6).map(|power| power.as_str()))?;
            let per = match c.get(7).map(|per| per.as_str()) {
                Some("h") => "每小时".to_owned(),
                Some("s") => "每秒".into(),
                Some("min") => "每分钟".into(),
                Some("d") => "每天".into(),
                Some(per) => format!("每{}", self::unit(per, None)?),
                None => String::new(),
            };
            Some(format!(
                "{per}{}{}{to}{unit}",
                minus::<Chinese>(&c[1]),
                if to.is_empty() { counted(&c[2]) } else { quantity(&c[2]) }
            ))
        },
    );
}

fn share(sign: &str) -> &'static str {
    if sign == "‰" { "千分之" } else { "百分之" }
}

/// An amount without the hundredths where there are none.
fn rounded(text: &str) -> &str {
    text.strip_suffix(".00").or(text.strip_suffix(".0")).unwrap_or(text)
}

/// A kilometre has another name before a power.
fn unit(sign: &str, power: Option<&str>) -> Option<String> {
    characters::unit::<Chinese>(sign, power, &[("公里", "千米")])
}

fn sums(rules: &mut Vec<Rule>) {
    loose(rules, &format!(r"(-?)({N})((?: ?(?:[<>!]=|[-+*×x÷=≠≈<>≤≥−]) ?-?{N})+)"), |c, context| {
        if context.next().is_some_and(|next| next.is_ascii_alphanumeric()) {
            return None;
        }
        let rest = &c[3];
        let certain = rest.contains(['+', '=', '×', '÷', '<', '>', '≤', '≥', '≈', '≠', '*']);
        certain.then(|| sum::<Chinese>(&c[1], &c[2], rest)).flatten()
    });
    rule(rules, &format!(r"({N})\^(-?)(\d{{1,3}})"), |c, _| {
        Some(format!("{}的{}{}次方", quantity(&c[1]), minus::<Chinese>(&c[2]), quantity(&c[3])))
    });
    // "3000+"
    loose(rules, &format!(r"({N})\+"), |c, context| {
        let more = context.next().is_none_or(|next| !next.is_ascii_alphanumeric() && next != ' ' && next != '+');
        let counted = context.next().is_some_and(char::is_alphabetic);
        more.then(|| format!("{}{}", quantity(&c[1]), if counted { "多" } else { "加" }))
    });
    rule(rules, &format!(r"([≤≥<>≈≠±+]=?) ?({N})"), |c, _| {
        let word = match &c[1] {
            "±" => "正负",
            "+" => "加",
            sign => Chinese::operator(sign)?.0,
        };
        Some(format!("{word}{}", quantity(&c[2])))
    });
    // What is counted, from here to there.
    loose(rules, &format!(r"({N}) ?{RANGE} ?({N})"), |c, context| {
        let counts = COUNTERS.iter().any(|word| context.after.starts_with(word));
        let to = if counts { counted(&c[2]) } else { quantity(&c[2]) };
        (!context.next().is_some_and(|next| next.is_ascii_digit())).then(|| format!("{}到{to}", quantity(&c[1])))
    });
}

fn bare(rules: &mut Vec<Rule>) {
    loose(rules, r"([-−])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)", |c, context| {
        let word = match context.last() {
            Some('年' | '月' | '日' | '号' | '时' | '点' | '分' | '楼' | '岁') => "到",
            Some(last) if last.is_ascii_alphanumeric() => "",
            _ => "负",
        };
        Some(format!("{word}{}", quantity(&c[2])))
    });
    characters::version::<Chinese>(rules);
    loose(rules, &format!("({N})"), plain);
    loose(rules, r"#(\d+)", |c, _| Some(format!("{}号", quantity(&c[1]))));
}

fn plain(c: &Captures<'_>, context: &Context<'_>) -> Option<String> {
    let text = &c[1];
    let behind = context.after.trim_start();
    if text == "2" && !context.before.ends_with('第') {
        let weight = behind.starts_with('两');
        let dated = ["月", "号", "日", "楼", "班", "年级", "点半", "次方"].iter().any(|word| behind.starts_with(word));
        let half_past = behind.starts_with("点半") || behind.starts_with("点");
        if half_past || (!weight && !dated && COUNTERS.iter().any(|word| behind.starts_with(word))) {
            return Some("两".into());
        }
    }
    Some(quantity(text))
}
