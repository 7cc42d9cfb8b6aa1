//! The rules of Japanese.

use super::numbers::{Japanese, cardinal, digits, phone, quantity};
use super::tables::{CURRENCIES, TEAMS};
use crate::text::characters::{
    self, Characters as _, NUMBER as N, date, full_dates, link, loose, minus, number, partial_dates, rule, sum,
};
use crate::text::scan::{Context, Rule};

const CURRENCY: &str =
    r"(?:US\$|A\$|C\$|HK\$|NZ\$|[$￥¥€£₩]|USD|JPY|HKD|AUD|CAD|EUR|GBP|KRW|CNY|RMB|TWD|CHF|SGD|NZD|THB|INR|RUB)";
const UNIT: &str = r"(?:° ?[CF]|[℃°Ω㎡㎏㎝㎜㎞㎥%‰]|[A-Za-zμ]{1,4})";
const RANGE: &str = Japanese::RANGE;

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
    link::<Japanese>(rules);
    characters::roman::<Japanese>(rules);
    // "月〜金": from one day of the week to another; behind a number or another character the sign is one of a word.
    loose(
        rules,
        r"([月火水木金土日])(曜日?)? ?[〜～~–-] ?([月火水木金土日])(曜日?)?",
        |c, context| {
            let joined = context.last().is_some_and(|last| last.is_alphanumeric() && last != '週');
            let of_week = |at: usize| c.get(at).map_or("曜", |of| of.as_str());
            (!joined || c.get(2).is_some()).then(|| format!("{}{}から{}{}", &c[1], of_week(2), &c[3], of_week(4)))
        },
    );
    // "R6年": the reign by its letter.
    loose(rules, r"([MTSHR])\.?(\d{1,2})年", |c, _| {
        let reign = match &c[1] {
            "M" => "明治",
            "T" => "大正",
            "S" => "昭和",
            "H" => "平成",
            _ => "令和",
        };
        Some(format!("{reign}{}年", quantity(&c[2])))
    });
    rule(rules, r"([A-Z]{1,4})(\d{5,20})", |c, _| Some(format!("{}{}", &c[1], digits(&c[2]))));
    rule(rules, r"H2O", |_, _| Some("エイチツーオー".into()));
    rule(rules, r"CO2", |_, _| Some("シーオーツー".into()));
    rule(rules, r"([A-Z])2([A-Z])", |c, _| Some(format!("{} to {}", &c[1], &c[2])));
    rule(rules, r"([A-Za-z])(?:²|\^2)", |c, _| Some(format!("{}の二乗", &c[1])));
    rule(rules, r"([A-Za-z])(?:³|\^3)", |c, _| Some(format!("{}の三乗", &c[1])));
    rule(rules, r"FOREVER21", |_, _| Some("FOREVERトゥエンティーワン".into()));
    money(rules);
    rule(rules, r"No\.(\d{1,12})", |c, _| Some(format!("No.{}", digits(&c[1]))));
    rule(rules, r"(番号|コード|暗証番号|品番)(は?)(\d{3,20})", |c, _| {
        Some(format!("{}{}{}", &c[1], &c[2], digits(&c[3])))
    });
    // "R-18": the hyphen is not a minus.
    rule(rules, r"([A-Z]{1,8})-(\d{1,4})", |c, _| Some(format!("{}{}", &c[1], quantity(&c[2]))));
}

fn codes(rules: &mut Vec<Rule>) {
    link::<Japanese>(rules);
    characters::internet_address::<Japanese>(rules);
    // Telephone numbers begin with a zero or with the code of a country.
    rule(rules, r"\+(\d{1,3})([- ]?)(0?\d{1,4})((?:-\d{2,8}){1,3}|\d{6,9})", |c, _| {
        let joint = if &c[2] == "-" { "の" } else { "" };
        Some(format!("プラス{}{joint}{}{}", digits(&c[1]), phone(&c[3]), hyphens(&c[4])))
    });
    rule(rules, r"(0\d{1,4})((?:-\d{2,8}){1,2})", |c, _| {
        // A month and a day is no telephone number.
        (c[0].len() > 8).then(|| format!("{}{}", phone(&c[1]), hyphens(&c[2])))
    });
    loose(rules, "[①-⑳]", |c, _| Some(cardinal(c[0].chars().next()? as u128 - '①' as u128 + 1)));
    loose(rules, "㈱", |_, _| Some("株式会社".into()));
    // Blocks and houses of an address: "千代田区1-2-3".
    rule(rules, r"\d{1,4}(?:-\d{1,4}){1,3}", |c, context| {
        let after =
            ['区', '町', '村', '丁', '目', '条', '園', '通'].iter().any(|place| context.before.ends_with(*place));
        // Three small groups right behind a name are no sum.
        let house = c[0].split('-').count() == 3 && c[0].split('-').all(|group| group.len() <= 2);
        let placed = after || house && context.last().is_some_and(|last| ('\u{4e00}'..='\u{9fff}').contains(&last));
        placed.then(|| c[0].split('-').map(quantity).collect::<Vec<_>>().join("の"))
    });
    rule(rules, r"0[5789]0\d{8}", |c, _| Some(phone(&c[0])));
    rule(rules, r"〒 ?(\d{3})-(\d{4})", |c, _| Some(format!("郵便番号{}の{}", phone(&c[1]), phone(&c[2]))));
    loose(rules, r"(\d{1,6})号室", |c, _| Some(format!("{}号室", digits(&c[1]))));
}

/// The groups of a telephone number behind its first.
fn hyphens(text: &str) -> String {
    text.split('-').map(phone).collect::<Vec<_>>().join("の")
}

fn dates(rules: &mut Vec<Rule>) {
    full_dates::<Japanese>(rules);
    characters::short_dates::<Japanese>(rules);
    rule(rules, r"((?:1[5-9]|20)\d0)s", |c, _| Some(format!("{}年代", quantity(&c[1]))));
    rule(rules, r"((?:1[5-9]|20)\d0)s ?[-–〜～] ?((?:1[5-9]|20)\d0)s", |c, _| {
        Some(format!("{}年代から{}年代", quantity(&c[1]), quantity(&c[2])))
    });
    partial_dates::<Japanese>(rules);
    // The day of the week behind a date.
    loose(
        rules,
        &format!(r"[(（]([月火水木金土日])(?:({RANGE})([月火水木金土日]))?(?:・?(祝))?[)）]"),
        |c, context| {
            let dated = context.last().is_some_and(|last| last == '日' || last.is_ascii_digit());
            let to = c.get(3).map(|to| format!("から{}曜日", to.as_str())).unwrap_or_default();
            let feast = if c.get(4).is_some() { "祝日" } else { "" };
            dated.then(|| format!("{}曜日{to}{feast}", &c[1]))
        },
    );
    // More than a whole is a day sooner than a share: "12/5".
    rule(rules, r"(\d{1,2})/(\d{1,2})", |c, context| {
        let day = number(&c[1]) > number(&c[2]) && context.next().is_none_or(|next| !next.is_ascii_alphanumeric());
        day.then(|| date::<Japanese>(None, &c[1], Some(&c[2]))).flatten()
    });
    // Without zeros a date is known by what follows it.
    rule(rules, r"(\d{1,2})[-/](\d{1,2})", |c, context| {
        let dated =
            ["から", "まで", "です", "でした", "(月", "(火", "(水", "(木", "(金", "(土", "(日", "（", "に開", "に行"];
        dated
            .iter()
            .any(|word| context.after.starts_with(word))
            .then(|| date::<Japanese>(None, &c[1], Some(&c[2])))
            .flatten()
    });
}

fn clock(hour: &str, minute: &str, second: Option<&str>) -> Option<String> {
    let (h, m) = (number(hour), number(minute));
    (h <= 30 && m < 60).then_some(())?;
    let mut said = format!("{}時", cardinal(h));
    if m > 0 || second.is_some() {
        said.push_str(&format!("{}分", cardinal(m)));
    }
    if let Some(second) = second {
        said.push_str(&format!("{}秒", cardinal(number(second))));
    }
    Some(said)
}

fn half(text: Option<&str>) -> &'static str {
    match text {
        None => "",
        Some(text) if text.starts_with(['a', 'A']) => "午前",
        Some(_) => "午後",
    }
}

fn times(rules: &mut Vec<Rule>) {
    let half_of_day = r"(?: ?(?i:([ap]\.? ?m)\b\.?))?";
    rule(
        rules,
        &format!(r"(\d{{1,2}}):(\d{{2}}){half_of_day} ?{RANGE} ?(\d{{1,2}}):(\d{{2}}){half_of_day}"),
        |c, _| {
            let group = |at: usize| c.get(at).map(|half| half.as_str());
            let (from, to) = (clock(&c[1], &c[2], None)?, clock(&c[4], &c[5], None)?);
            Some(format!("{}{from}から{}{to}", half(group(3)), half(group(6))))
        },
    );
    rule(rules, &format!(r"(\d{{1,2}}):(\d{{2}})(?::(\d{{2}}))?{half_of_day}"), |c, _| {
        let said = clock(&c[1], &c[2], c.get(3).map(|second| second.as_str()))?;
        Some(format!("{}{said}", half(c.get(4).map(|half| half.as_str()))))
    });
    rule(rules, r"(\d{1,2}) ?(?i:([ap]\.?m)\b\.?)", |c, _| {
        Some(format!("{}{}", half(Some(&c[2])), clock(&c[1], "00", None)?))
    });
    loose(rules, r"\d{1,4}(?:[:∶]\d{1,4}){2,5}", |c, _| {
        Some(c[0].split([':', '∶']).map(quantity).collect::<Vec<_>>().join("対"))
    });
    rule(rules, r"(\d{1,4}) ?[:∶] ?(\d{1,4})", |c, _| Some(format!("{}対{}", quantity(&c[1]), quantity(&c[2]))));
    rule(rules, r"(\d{1,3})[-–](\d{1,3})", |c, context| {
        let won = ["で勝", "で敗", "で負", "で快勝", "で完勝", "で引き分け", "の勝利", "の敗"];
        let played = TEAMS.iter().any(|team| context.before.trim_end().ends_with(team))
            || won.iter().any(|word| context.after.starts_with(word));
        played.then(|| format!("{}対{}", quantity(&c[1]), quantity(&c[2])))
    });
}

fn money(rules: &mut Vec<Rule>) {
    rule(rules, &format!(r"({CURRENCY}) ?({N})([千万億兆]{{0,2}})"), |c, _| {
        let name = CURRENCIES.iter().find(|(sign, _)| *sign == &c[1])?.1;
        Some(format!("{}{}{name}", quantity(&c[2]), &c[3]))
    });
}

fn measures(rules: &mut Vec<Rule>) {
    money(rules);
    characters::mixed::<Japanese>(rules);
    rule(rules, &format!(r"({N})([千万億兆]{{0,2}}) ?({CURRENCY})"), |c, _| {
        let name = CURRENCIES.iter().find(|(sign, _)| *sign == &c[3])?.1;
        Some(format!("{}{}{name}", quantity(&c[1]), &c[2]))
    });
    rule(rules, &format!(r"(-?)(\d{{1,9}}) ?/ ?(\d{{1,9}}) ?({UNIT})"), |c, _| {
        let unit = characters::unit::<Japanese>(&c[4], None, &[])?;
        Some(format!("{}分の{}{}{unit}", quantity(&c[3]), minus::<Japanese>(&c[1]), quantity(&c[2])))
    });
    rule(rules, r"(-?)(\d{1,9}) ?/ ?(\d{1,9})", |c, _| {
        Some(format!("{}分の{}{}", quantity(&c[3]), minus::<Japanese>(&c[1]), quantity(&c[2])))
    });
    // A span with the measure at both ends.
    loose(rules, &format!(r"([-−]?)({N}) ?({UNIT}) ?{RANGE} ?([-−]?)({N}) ?({UNIT})"), |c, context| {
        if context.next().is_some_and(|next| next.is_ascii_alphanumeric() || matches!(next, '²' | '³' | '/')) {
            return None;
        }
        let unit = |sign: &str| characters::unit::<Japanese>(sign, None, &[]);
        let (from, to) = (unit(&c[3])?, unit(&c[6])?);
        let one = |sign: &str, number: &str| format!("{}{}", minus::<Japanese>(sign), quantity(number));
        Some(format!("{}{from}から{}{to}", one(&c[1], &c[2]), one(&c[4], &c[5])))
    });
    loose(
        rules,
        &format!(r"([-−]?)({N})(?: ?{RANGE} ?({N}))?( ?)({UNIT})([²³23])?(?:/({UNIT}))?(?:/(s))?"),
        |c, context| {
            // "10%OFF"
            let joined = context.next().is_some_and(|next| next.is_ascii_alphanumeric());
            if joined && !matches!(&c[5], "%" | "℃") {
                return None;
            }
            let to = c.get(3).map(|to| format!("から{}", quantity(to.as_str()))).unwrap_or_default();
            let unit = characters::unit::<Japanese>(&c[5], c.get(6).map(|power| power.as_str()), &[])?;
            let mut per = String::new();
            for at in [7, 8] {
                per.push_str(match c.get(at).map(|per| per.as_str()) {
                    None => "",
                    Some("h") => "毎時",
                    Some("s") => "毎秒",
                    Some("min") => "毎分",
                    Some(_) => return None,
                });
            }
            Some(format!("{}{}{to}{unit}{per}", minus::<Japanese>(&c[1]), quantity(&c[2])))
        },
    );
    // From a day, a year, a place to the next: "1日〜3日".
    loose(rules, "[〜～~]", |_, context| {
        let from = context.last().is_some_and(|last| last.is_alphanumeric() || matches!(last, ')' | '）'));
        // "4月〜": from then on.
        let ends = context.next().is_none_or(|next| matches!(next, '。' | '、' | ')' | '）' | ' '))
            && context
                .last()
                .is_some_and(|last| last.is_ascii_digit() || matches!(last, '月' | '日' | '時' | '分' | '年'));
        (from && (ends || context.next().is_some_and(char::is_alphanumeric))).then(|| "から".into())
    });
    // Spans of what is counted.
    rule(rules, &format!(r"({N}) ?[~～〜] ?({N})"), |c, _| {
        Some(format!("{}から{}", quantity(&c[1]), quantity(&c[2])))
    });
    rule(rules, &format!(r"({N})[-–]({N})"), |c, context| {
        let counted = context
            .next()
            .is_some_and(|next| !next.is_ascii() && next.is_alphabetic() && !matches!(next, '\u{3040}'..='\u{309f}'));
        counted.then(|| format!("{}から{}", quantity(&c[1]), quantity(&c[2])))
    });
}

fn sums(rules: &mut Vec<Rule>) {
    loose(rules, &format!(r"(-?)({N})((?: ?(?:[<>!]=|[-+*×÷=≠≈<>≤≥−]) ?-?{N})+)"), |c, context| {
        if context.next().is_some_and(|next| next.is_ascii_alphanumeric()) {
            return None;
        }
        sum::<Japanese>(&c[1], &c[2], &c[3])
    });
    rule(rules, &format!(r"({N})\^(-?)(\d{{1,3}})"), |c, _| {
        Some(format!("{}の{}{}乗", quantity(&c[1]), minus::<Japanese>(&c[2]), quantity(&c[3])))
    });
    loose(rules, &format!(r"([-+*×÷=±]) ?({N})"), |c, context: &Context<'_>| {
        let word = match &c[1] {
            "±" => "プラスマイナス",
            "-" if context.last().is_some_and(|last| last.is_ascii_alphabetic()) => "",
            sign => Japanese::operator(sign)?.0,
        };
        Some(format!("{word}{}", quantity(&c[2])))
    });
}

fn bare(rules: &mut Vec<Rule>) {
    characters::version::<Japanese>(rules);
    loose(rules, &format!("({N})"), |c, _| {
        let text = &c[1];
        // So many different digits are a number of something, not a quantity.
        let identifies = text.len() >= 9
            && text.bytes().all(|b| b.is_ascii_digit())
            && text.bytes().filter(|b| *b != b'0').count() > 6;
        Some(if identifies { digits(text) } else { quantity(text) })
    });
}
