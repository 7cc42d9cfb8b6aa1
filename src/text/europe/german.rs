//! German.

use super::{
    Measured, Money, Part, Signs, Tongue, Words, counted, ends_in, minute_at, money, number, quantity, rule, year_at,
};
use crate::text::days;
use crate::text::scan::{Context, Rule};

pub(super) struct German;

const SMALL: [&str; 20] = [
    "null",
    "eins",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
];
const TENS: [&str; 10] =
    ["", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"];

/// Words that an ordinal follows.
const BEFORE_ORDINALS: [&str; 15] =
    ["der", "die", "das", "dem", "den", "des", "am", "im", "zum", "vom", "beim", "zur", "bis", "ab", "seit"];

/// Less than a hundred; a last one is `one`.
fn tens(n: u64, one: &str) -> String {
    let small = |n: u64| if n == 1 { "ein" } else { SMALL[n as usize] };
    match (n, n % 10) {
        (1, _) => one.into(),
        (0..20, _) => SMALL[n as usize].into(),
        (_, 0) => TENS[n as usize / 10].into(),
        (_, last) => format!("{}und{}", small(last), TENS[n as usize / 10]),
    }
}

fn thousand(n: u64, one: &str) -> String {
    let (hundred, rest) = (n / 100, n % 100);
    let mut said = match hundred {
        0 => String::new(),
        1 => "einhundert".into(),
        _ => format!("{}hundert", SMALL[hundred as usize]),
    };
    if rest > 0 {
        said.push_str(&tens(rest, one));
    }
    said
}

fn words(n: u128, one: &str) -> String {
    if n == 0 {
        return SMALL[0].into();
    }
    let mut said = Vec::new();
    for (size, single, several) in [
        (1_000_000_000_000_u128, "eine Billion", "Billionen"),
        (1_000_000_000, "eine Milliarde", "Milliarden"),
        (1_000_000, "eine Million", "Millionen"),
    ] {
        match (n / size % 1_000) as u64 {
            0 => {}
            1 => said.push(single.to_owned()),
            many => said.push(format!("{} {several}", thousand(many, "ein"))),
        }
    }
    let (thousands, rest) = ((n / 1_000 % 1_000) as u64, (n % 1_000) as u64);
    let mut last = if thousands > 0 { format!("{}tausend", thousand(thousands, "ein")) } else { String::new() };
    if rest > 0 {
        last.push_str(&thousand(rest, one));
    }
    if !last.is_empty() {
        said.push(last);
    }
    said.join(" ")
}

/// An hour of the clock.
fn words_of(text: &str) -> String {
    words(number(text), "ein")
}

/// "fünft", to which the ending comes.
fn stem(n: u128) -> String {
    let said = words(n, "eins");
    match n % 100 {
        1 => format!("{}erst", said.strip_suffix("eins").unwrap_or(&said)),
        3 => format!("{}dritt", said.strip_suffix("drei").unwrap_or(&said)),
        7 => format!("{}siebt", said.strip_suffix("sieben").unwrap_or(&said)),
        // "achte" has one t.
        8 => said,
        0..20 if !n.is_multiple_of(100) => said + "t",
        _ => said + "st",
    }
}

/// "der Vierzehnte", behind the name of somebody who ruled.
fn ruler(value: u128, context: &Context<'_>) -> Option<String> {
    const KINGS: [&str; 20] = [
        "Ludwig",
        "Karl",
        "Friedrich",
        "Wilhelm",
        "Heinrich",
        "Otto",
        "Napoleon",
        "Franz",
        "Joseph",
        "Leopold",
        "Georg",
        "Philipp",
        "Paul",
        "Johannes",
        "Pius",
        "Benedikt",
        "Gregor",
        "Ramses",
        "Charles",
        "Albert",
    ];
    const QUEENS: [&str; 4] = ["Elisabeth", "Katharina", "Margarethe", "Maria"];
    let before = context.last_word();
    let genitive = before.strip_suffix('s').filter(|name| KINGS.contains(name));
    let article = match before {
        _ if KINGS.contains(&before) => "der",
        _ if QUEENS.contains(&before) => "die",
        _ => genitive.map(|_| "des")?,
    };
    let stem = stem(value);
    let mut chars = stem.chars();
    let first: String = chars.next()?.to_uppercase().collect();
    let ending = if article == "des" { "en" } else { "e" };
    Some(format!("{article} {first}{}{ending}", chars.as_str()))
}

/// The article and the ending of one half before `noun`; `first`: nothing stands before it.
fn half(noun: &str, feminine: bool, first: bool) -> &'static str {
    const NEUTER: [&str; 11] =
        ["Kilo", "gramm", "Pfund", "Jahr", "Glas", "Dutzend", "Jahrhundert", "Brot", "Prozent", "chen", "Stück"];
    match (feminine, ends_in(noun, &NEUTER) || noun == "Gramm") {
        (true, _) => "eine halbe",
        (_, true) => "ein halbes",
        // What is taken, drunk or waited for, unless it stands first.
        _ if first => "ein halber",
        _ => "einen halben",
    }
}

fn weekday(short: &str) -> Option<&'static str> {
    const DAYS: [&str; 7] = ["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"];
    DAYS.into_iter().find(|day| day.starts_with(short))
}

impl Tongue for German {
    const WORDS: Words = Words {
        point: "Komma",
        minus: "minus",
        plus: "plus",
        to: "bis",
        percent: "Prozent",
        times: "mal",
        divided: "geteilt durch",
        equals: "gleich",
        and: "und",
        section: ["Paragraf", "Paragrafen"],
        ratio: "zu",
        number: "Nummer",
        codes: &[
            "code",
            "pin",
            "tan",
            "plz",
            "postleitzahl",
            "bestellnummer",
            "kundennummer",
            "auftragsnummer",
            "buchungsnummer",
            "rechnungsnummer",
            "ticketnummer",
            "vorgangsnummer",
            "referenznummer",
            "kontonummer",
            "kartennummer",
            "buchungscode",
            "sicherheitscode",
            "iban",
            "durchwahl",
            "flug",
        ],
        before_days: &[],
        signs: Signs {
            at: "ät", dot: "Punkt", slash: "Schrägstrich", dash: "Bindestrich", underscore: "Unterstrich"
        },
        per: "pro",
        months: [
            "Januar",
            "Februar",
            "März",
            "April",
            "Mai",
            "Juni",
            "Juli",
            "August",
            "September",
            "Oktober",
            "November",
            "Dezember",
        ],
        units: UNITS,
        money: MONEY,
        before_cents: "",
        abbreviations: ABBREVIATIONS,
    };

    fn cardinal(n: u128) -> String {
        words(n, "eins")
    }

    fn counting(n: u128, feminine: bool) -> String {
        words(n, if feminine { "eine" } else { "ein" })
    }

    fn counted(n: u128, word: &str) -> Option<bool> {
        const FEMININE: [&str; 9] = ["e", "ung", "heit", "keit", "schaft", "ion", "tät", "ei", "nacht"];
        const KNOWN: [&str; 8] = ["Nacht", "Person", "Stadt", "Antwort", "Nummer", "Zahl", "Mail", "Kraft"];
        const OTHERS: [&str; 8] = ["Kunde", "Kollege", "Name", "Junge", "Ende", "Auge", "Gebäude", "Interesse"];
        let feminine = ends_in(word, &FEMININE) && !OTHERS.contains(&word) || KNOWN.contains(&word);
        // Of a plural the ending tells nothing, and no number takes one.
        word.starts_with(char::is_uppercase).then_some(n == 1 && feminine)
    }

    fn year(n: u128) -> String {
        if !(1_100..2_000).contains(&n) {
            return Self::cardinal(n);
        }
        let rest = (n % 100) as u64;
        format!("{}hundert{}", SMALL[(n / 100) as usize], if rest > 0 { tens(rest, "eins") } else { String::new() })
    }

    fn day(n: u128, before: &str) -> String {
        Self::ordinal(n, before)
    }

    fn clock(hour: u128, minute: u128) -> String {
        let hour = words(hour, "ein");
        if minute == 0 { format!("{hour} Uhr") } else { format!("{hour} Uhr {}", Self::cardinal(minute)) }
    }

    fn ordinal(n: u128, before: &str) -> String {
        let ending = match before.to_lowercase().as_str() {
            "am" | "vom" | "zum" | "im" | "beim" | "dem" | "den" | "bis" | "ab" | "seit" | "des" | "zur" => "en",
            "der" | "die" | "das" => "e",
            _ => "er",
        };
        format!("{}{ending}", stem(n))
    }

    fn fraction(top: u128, bottom: u128) -> String {
        let part = match bottom {
            2 if top == 1 => return "ein halb".into(),
            2 => "halbe".to_owned(),
            _ => {
                let stem = stem(bottom);
                let mut chars = stem.chars();
                let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
                format!("{first}{}el", chars.as_str())
            }
        };
        format!("{} {part}", words(top, "ein"))
    }

    fn mixed(whole: u128, top: u128, bottom: u128) -> String {
        let part = if (top, bottom) == (1, 2) { "halb".into() } else { stem(bottom) + "el" };
        format!("{}{}{part}", words(whole, "ein"), words(top, "ein"))
    }

    fn part_of(part: Part, of: Measured<'_>, first: bool) -> String {
        match part {
            Part { whole: Some(whole), top, bottom } => format!("{} {}", Self::mixed(whole, top, bottom), of.many),
            Part { top: 1, bottom: 2, .. } => format!("{} {}", half(of.one, of.feminine, first), of.one),
            Part { top, bottom, .. } => format!("{} {}", Self::fraction(top, bottom), of.one),
        }
    }

    fn measured(word: &str) -> Option<(String, bool)> {
        Self::counted(1, word).map(|feminine| (word.to_owned(), feminine))
    }

    fn times(n: u128) -> String {
        format!("{}mal", words(n, "ein"))
    }

    fn roman(value: u128, _short: bool, context: &Context<'_>) -> Option<String> {
        const NUMBERED: [&str; 14] = [
            "Kapitel",
            "Band",
            "Teil",
            "Akt",
            "Szene",
            "Artikel",
            "Abschnitt",
            "Anhang",
            "Stufe",
            "Phase",
            "Typ",
            "Klasse",
            "Buch",
            "Titel",
        ];
        let before = context.last_word();
        if NUMBERED.contains(&before) {
            return Some(Self::cardinal(value));
        }
        ruler(value, context)
    }

    fn own(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
        let months =
            r"(Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember)(?: (\d{4}))?";
        rule(numbers, &format!(r"(\d{{1,2}})\. ?[-–] ?(\d{{1,2}})\. ?{months}"), |c, context| {
            let day = |at: usize| Self::ordinal(number(&c[at]), context.last_word());
            Some(format!("{} bis {} {}{}", day(1), day(2), &c[3], year_at::<Self>(c, 4)))
        });
        // "der 3.-5. Platz"
        super::loose(numbers, r"(\d{1,3})\. ?(?:[-–]|bis) ?(\d{1,3})\.", |c, context| {
            let led = BEFORE_ORDINALS.contains(&context.last_word().to_lowercase().as_str());
            let noun = context.after.starts_with(' ') && context.next_word().starts_with(char::is_uppercase);
            let nth = |at: usize| Self::ordinal(number(&c[at]), context.last_word());
            (led && noun).then(|| format!("{} bis {}", nth(1), nth(2)))
        });
        super::loose(numbers, r"(\d{1,2})\.(\d{1,2})\. ?[-–] ?(\d{1,2})\.(\d{1,2})\.(\d{4})?", |c, context| {
            let from = super::date::<Self>(&c[1], &c[2], None, context)?;
            let to = super::date::<Self>(&c[3], &c[4], c.get(5).map(|year| year.as_str()), context)?;
            Some(format!("{from} bis {to}"))
        });
        rule(numbers, &format!(r"(\d{{1,2}})\. ?{months}"), |c, context| {
            let day = Self::ordinal(number(&c[1]), context.last_word());
            Some(format!("{day} {}{}", &c[2], year_at::<Self>(c, 3)))
        });
        rule(numbers, r"(\d{1,2})\.(\d{1,2})\.", |c, context| {
            let part = matches!(context.last_word(), "Version" | "Kapitel" | "Abschnitt" | "Punkt");
            (!part).then(|| super::date::<Self>(&c[1], &c[2], None, context)).flatten()
        });
        rule(numbers, r"(\d{1,2}) ?(?:-|–|bis) ?(\d{1,2}) Uhr", |c, _| {
            Some(format!("{} bis {} Uhr", words_of(&c[1]), words_of(&c[2])))
        });
        rule(numbers, r"(\d{1,2})[.:](\d{2}) ?(?:[-–]|bis) ?(\d{1,2})[.:](\d{2}) ?Uhr", |c, _| {
            let [from, first, to, last] = [1, 2, 3, 4].map(|at| number(&c[at]));
            (from <= 24 && to <= 24 && first < 60 && last < 60)
                .then(|| format!("{} bis {}", Self::clock(from, first), Self::clock(to, last)))
        });
        rule(numbers, r"(\d{1,2})\.(\d{2}) ?Uhr", |c, _| {
            let (hour, minute) = (number(&c[1]), number(&c[2]));
            (hour <= 24 && minute < 60).then(|| Self::clock(hour, minute))
        });
        rule(numbers, r"([13])/4 Stunde", |c, _| {
            Some(if &c[1] == "1" { "eine Viertelstunde" } else { "eine Dreiviertelstunde" }.into())
        });
        // "10 Min. warten": the stop is that of the word, where a sentence goes on.
        super::loose(
            numbers,
            &format!(r"(?:(\d{{1,3}}) 1/2|(1/2)|({})) ?(Min|Std|Sek|Pck|Msp|Stk)\. ", super::N),
            |c, context| {
                let (one, many, feminine) = super::unit::<Self>(&c[4])?;
                // What is baked with is a noun.
                let on =
                    context.next().is_some_and(|next| next.is_lowercase() || matches!(&c[4], "Pck" | "Msp" | "Stk"));
                let half = |whole| Part { whole, top: 1, bottom: 2 };
                let of = Measured { one, many, feminine };
                let said = match (c.get(1), c.get(3)) {
                    (Some(whole), _) => Self::part_of(half(Some(number(whole.as_str()))), of, false),
                    (_, Some(amount)) => counted::<Self>(amount.as_str(), one, many, feminine),
                    _ => Self::part_of(half(None), of, context.before.trim().is_empty()),
                };
                on.then(|| format!("{said} "))
            },
        );
        rule(numbers, r"(\d{1,3})-?mal", |c, _| Some(Self::times(number(&c[1]))));
        rule(numbers, r"(\d{1,2}) Uhr(?: (\d{1,2}))?", |c, _| Some(Self::clock(number(&c[1]), minute_at(c, 2))));
        rule(numbers, r"([1-9]0)er", |c, _| Some(format!("{}er", Self::cardinal(number(&c[1])))));
        rule(numbers, r"((?:1[1-9]|20)\d0)er", |c, _| Some(format!("{}er", Self::year(number(&c[1])))));
        rule(numbers, r"(\d+),(\d+) ?(Mio|Mrd)\.?", |c, _| {
            let size = if &c[3] == "Mio" { "Millionen" } else { "Milliarden" };
            Some(format!("{} {size}", quantity::<Self>(&format!("{},{}", &c[1], &c[2]))))
        });
        rule(numbers, r"(\d+) ?(Mio|Mrd)\.?", |c, _| {
            let (one, many) = if &c[2] == "Mio" { ("Million", "Millionen") } else { ("Milliarde", "Milliarden") };
            Some(counted::<Self>(&c[1], one, many, true))
        });
        // "der 3. Platz": an ordinal is one where a capital follows.
        super::loose(numbers, r"(\d{1,3})\.", |c, context: &Context<'_>| {
            let noun = context.after.starts_with(' ') && context.next_word().starts_with(char::is_uppercase);
            let before = context.last_word().to_lowercase();
            let led = BEFORE_ORDINALS.contains(&before.as_str());
            let small = context.next_word().starts_with(char::is_lowercase);
            (led && (noun || small)).then(|| Self::ordinal(number(&c[1]), &before))
        });
        // "Mo.–Fr.", "Mo bis Fr"; "Fr." by itself is a woman.
        super::loose(words, &days::pattern("(?:Mo|Di|Mi|Do|Fr|Sa|So)"), |c, context| {
            days::say(&c[0], context.after, weekday, "bis", "und")
        });
        // "Mo. 9 Uhr", "Sa., 5. Mai"
        super::loose(words, r"(Mo|Di|Mi|Do|Fr|Sa|So)\.(,? )", |c, context| {
            let dated = context.next().is_some_and(|next| next.is_ascii_digit());
            dated.then(|| Some(format!("{}{}", weekday(&c[1])?, &c[2]))).flatten()
        });
        super::loose(words, r"(Mo|Di|Mi|Do|Fr|Sa|So)\.,", |c, context| {
            let day = matches!(context.last_word(), "am" | "vom" | "bis" | "ab" | "seit");
            day.then(|| Some(format!("{},", weekday(&c[1])?))).flatten()
        });
        super::loose(words, r"(\p{Lu}\p{Ll}{2,24})str\.", |c, context| {
            let end = if context.after.trim().is_empty() { "." } else { "" };
            Some(format!("{}straße{end}", &c[1]))
        });
        // "Ludwig XIV. war": the stop belongs to the number, unless it ends everything.
        super::loose(words, r"([IVXLC]{1,9})\.", |c, context| {
            let end = if context.after.trim().is_empty() { "." } else { "" };
            // "Karl C. Meier" has an initial.
            let value = crate::text::en::roman(&c[1]).filter(|_| !matches!(&c[1], "L" | "C"))?;
            Some(format!("{}{end}", ruler(value, context)?))
        });
        rule(words, r"(Nr|Abs|Kap|Bd|Art|Str|S)\. ?(\d{1,6})", |c, _| {
            let long = match &c[1] {
                "S" => "Seite",
                "Nr" => "Nummer",
                "Abs" => "Absatz",
                "Kap" => "Kapitel",
                "Bd" => "Band",
                "Str" => "Straße",
                _ => "Artikel",
            };
            Some(format!("{long} {}", quantity::<Self>(&c[2])))
        });
    }
}

#[rustfmt::skip]
const UNITS: &[(&str, &str, &str, bool)] = &[
    ("kg", "Kilogramm", "Kilogramm", false), ("g", "Gramm", "Gramm", false), ("mg", "Milligramm", "Milligramm", false),
    ("t", "Tonne", "Tonnen", true), ("km", "Kilometer", "Kilometer", false), ("m", "Meter", "Meter", false),
    ("cm", "Zentimeter", "Zentimeter", false), ("mm", "Millimeter", "Millimeter", false), ("l", "Liter", "Liter", false),
    ("L", "Liter", "Liter", false), ("ml", "Milliliter", "Milliliter", false), ("h", "Stunde", "Stunden", true),
    ("Std", "Stunde", "Stunden", true), ("min", "Minute", "Minuten", true), ("Min", "Minute", "Minuten", true),
    ("s", "Sekunde", "Sekunden", true), ("Sek", "Sekunde", "Sekunden", true), ("ms", "Millisekunde", "Millisekunden", true), ("m²", "Quadratmeter", "Quadratmeter", false),
    ("km²", "Quadratkilometer", "Quadratkilometer", false), ("cm²", "Quadratzentimeter", "Quadratzentimeter", false),
    ("m³", "Kubikmeter", "Kubikmeter", false), ("°C", "Grad Celsius", "Grad Celsius", false), ("℃", "Grad Celsius", "Grad Celsius", false),
    ("°F", "Grad Fahrenheit", "Grad Fahrenheit", false), ("°", "Grad", "Grad", false), ("‰", "Promille", "Promille", false),
    ("kB", "Kilobyte", "Kilobyte", false), ("MB", "Megabyte", "Megabyte", false), ("GB", "Gigabyte", "Gigabyte", false),
    ("TB", "Terabyte", "Terabyte", false), ("Hz", "Hertz", "Hertz", false), ("kHz", "Kilohertz", "Kilohertz", false),
    ("MHz", "Megahertz", "Megahertz", false), ("GHz", "Gigahertz", "Gigahertz", false), ("V", "Volt", "Volt", false),
    ("W", "Watt", "Watt", false), ("kW", "Kilowatt", "Kilowatt", false), ("kWh", "Kilowattstunde", "Kilowattstunden", true),
    ("A", "Ampere", "Ampere", false), ("PS", "PS", "PS", false), ("ha", "Hektar", "Hektar", false), ("dB", "Dezibel", "Dezibel", false),
    ("kcal", "Kilokalorie", "Kilokalorien", true), ("hPa", "Hektopascal", "Hektopascal", false),
    ("kbit", "Kilobit", "Kilobit", false), ("Mbit", "Megabit", "Megabit", false), ("Gbit", "Gigabit", "Gigabit", false),
    ("EL", "Esslöffel", "Esslöffel", false), ("TL", "Teelöffel", "Teelöffel", false), ("Pck", "Päckchen", "Päckchen", false),
    ("Msp", "Messerspitze", "Messerspitzen", true), ("Stk", "Stück", "Stück", false),
    ("Mbps", "Megabit pro Sekunde", "Megabit pro Sekunde", false), ("Gbps", "Gigabit pro Sekunde", "Gigabit pro Sekunde", false),
];

const MONEY: &[Money] = &[
    money(&["€", "EUR"], "Euro", "Euro", ("Cent", "Cent"), false),
    money(&["$", "US$", "USD"], "Dollar", "Dollar", ("Cent", "Cent"), false),
    money(&["£", "GBP"], "Pfund", "Pfund", ("Pence", "Pence"), false),
    money(&["¥", "JPY"], "Yen", "Yen", ("Sen", "Sen"), false),
    money(&["CHF"], "Franken", "Franken", ("Rappen", "Rappen"), false),
];

#[rustfmt::skip]
const ABBREVIATIONS: &[(&str, &str)] = &[
    ("z.b", "zum Beispiel"), ("d.h", "das heißt"), ("u.a", "unter anderem"), ("z.t", "zum Teil"), ("i.d.r", "in der Regel"),
    ("u.u", "unter Umständen"), ("o.ä", "oder ähnlich"), ("v.a", "vor allem"), ("s.o", "siehe oben"), ("s.u", "siehe unten"),
    ("v.chr", "vor Christus"), ("n.chr", "nach Christus"), ("usw", "und so weiter"), ("etc", "et cetera"), ("bzw", "beziehungsweise"),
    ("ca", "circa"), ("dr", "Doktor"), ("prof", "Professor"), ("hr", "Herr"), ("fr", "Frau"), ("nr", "Nummer"), ("str", "Straße"),
    ("st", "Sankt"), ("evtl", "eventuell"), ("ggf", "gegebenenfalls"), ("inkl", "inklusive"), ("exkl", "exklusive"), ("vgl", "vergleiche"),
    ("sog", "sogenannt"), ("tel", "Telefon"), ("mio", "Millionen"), ("mrd", "Milliarden"), ("mind", "mindestens"), ("max", "maximal"),
    ("gem", "gemäß"), ("lt", "laut"), ("ggü", "gegenüber"), ("zzgl", "zuzüglich"), ("mwst", "Mehrwertsteuer"), ("u.v.m", "und vieles mehr"),
    ("bzgl", "bezüglich"), ("ff", "fortfolgende"), ("o.g", "oben genannt"), ("zzt", "zurzeit"), ("min", "mindestens"), ("jh", "Jahrhundert"), ("geb", "geboren"), ("abs", "Absatz"), ("allg", "allgemein"), ("bspw", "beispielsweise"),
];
