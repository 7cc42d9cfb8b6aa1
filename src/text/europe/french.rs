//! French.

use super::often::is_named;
use super::{
    Measured, Money, Part, Signs, Tongue, Words, counted, ends_in, group, minute_at, money, number, quantity, rule,
    year_at,
};
use crate::text::days;
use crate::text::scan::{Context, Rule};

pub(super) struct French;

const SMALL: [&str; 17] = [
    "zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze", "treize",
    "quatorze", "quinze", "seize",
];
const TENS: [&str; 7] = ["", "dix", "vingt", "trente", "quarante", "cinquante", "soixante"];

/// Less than a hundred; `last`: nothing follows, so that eighty has its s.
fn tens(n: u64, last: bool) -> String {
    match n {
        0..=16 => SMALL[n as usize].into(),
        17..=19 => format!("dix-{}", SMALL[n as usize - 10]),
        80 => if last { "quatre-vingts" } else { "quatre-vingt" }.into(),
        81..=99 => format!("quatre-vingt-{}", tens(n - 80, last)),
        71 => "soixante et onze".into(),
        70..=79 => format!("soixante-{}", tens(n - 60, last)),
        _ => match n % 10 {
            0 => TENS[n as usize / 10].into(),
            1 => format!("{} et un", TENS[n as usize / 10]),
            one => format!("{}-{}", TENS[n as usize / 10], SMALL[one as usize]),
        },
    }
}

fn thousand(n: u64, last: bool) -> String {
    let (hundred, rest) = (n / 100, n % 100);
    let head = match (hundred, rest) {
        (0, _) => return tens(rest, last),
        (1, _) => "cent".to_owned(),
        (_, 0) if last => format!("{} cents", SMALL[hundred as usize]),
        _ => format!("{} cent", SMALL[hundred as usize]),
    };
    if rest == 0 { head } else { format!("{head} {}", tens(rest, last)) }
}

fn words(n: u128) -> String {
    if n == 0 {
        return SMALL[0].into();
    }
    let mut said = Vec::new();
    for (size, name) in [(1_000_000_000_000_u128, "billion"), (1_000_000_000, "milliard"), (1_000_000, "million")] {
        match (n / size % 1_000) as u64 {
            0 => {}
            1 => said.push(format!("un {name}")),
            many => said.push(format!("{} {name}s", thousand(many, true))),
        }
    }
    match (n / 1_000 % 1_000) as u64 {
        0 => {}
        1 => said.push("mille".into()),
        many => said.push(format!("{} mille", thousand(many, false))),
    }
    if !n.is_multiple_of(1_000) {
        said.push(thousand((n % 1_000) as u64, true));
    }
    said.join(" ")
}

/// "deuxième".
fn nth(n: u128) -> String {
    if n == 1 {
        return "premier".into();
    }
    let said = words(n);
    let stem = match said.as_str() {
        text if text.ends_with("cinq") => return format!("{text}uième"),
        text if text.ends_with("neuf") => return format!("{}vième", text.trim_end_matches('f')),
        text => text.trim_end_matches('s'),
    };
    // "trois", "six" keep what looks like a plural.
    let stem = if said.ends_with("trois") { said.as_str() } else { stem };
    format!("{}ième", stem.trim_end_matches('e'))
}

/// "de" before a noun, shortened before a vowel and a silent h.
fn link(noun: &str) -> &'static str {
    const BREATHED: [&str; 12] = [
        "haricot",
        "héros",
        "hauteur",
        "hameau",
        "handicap",
        "hareng",
        "hérisson",
        "hibou",
        "homard",
        "hollandais",
        "hongrois",
        "haut",
    ];
    let silent = noun.starts_with('h') && !BREATHED.iter().any(|word| noun.starts_with(word));
    let vowel = noun.starts_with(['a', 'e', 'i', 'o', 'u', 'é', 'è', 'ê', 'â', 'î', 'ô', 'œ', 'à']);
    if (vowel && !noun.starts_with("onz")) || silent || noun == "yeux" { "d'" } else { "de " }
}

fn weekday(short: &str) -> Option<&'static str> {
    const DAYS: [&str; 7] = ["lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche"];
    let short = short.to_lowercase();
    DAYS.into_iter().find(|day| day.get(..3) == Some(short.as_str()))
}

impl Tongue for French {
    const WORDS: Words = Words {
        point: "virgule",
        minus: "moins",
        plus: "plus",
        to: "à",
        percent: "pour cent",
        times: "fois",
        divided: "divisé par",
        equals: "égale",
        and: "et",
        section: ["paragraphe", "paragraphes"],
        ratio: "à",
        number: "numéro",
        codes: &[
            "code",
            "pin",
            "postal",
            "commande",
            "dossier",
            "référence",
            "réservation",
            "client",
            "compte",
            "facture",
            "ticket",
            "vol",
            "iban",
        ],
        before_days: &["le", "du", "au", "lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche"],
        signs: Signs { at: "arobase", dot: "point", slash: "barre oblique", dash: "tiret", underscore: "tiret bas" },
        per: "par",
        months: [
            "janvier",
            "février",
            "mars",
            "avril",
            "mai",
            "juin",
            "juillet",
            "août",
            "septembre",
            "octobre",
            "novembre",
            "décembre",
        ],
        units: UNITS,
        money: MONEY,
        before_cents: "",
        abbreviations: ABBREVIATIONS,
    };

    fn cardinal(n: u128) -> String {
        words(n)
    }

    fn counting(n: u128, feminine: bool) -> String {
        let said = words(n);
        match said.strip_suffix("un") {
            Some(head) if feminine => format!("{head}une"),
            _ => said,
        }
    }

    fn counted(_n: u128, word: &str) -> Option<bool> {
        // Of the others "un" is right, or more often than not.
        const FEMININE: [&str; 7] = ["tion", "sion", "ée", "ette", "ance", "ence", "aine"];
        const KNOWN: [&str; 18] = [
            "heure", "minute", "seconde", "personne", "fois", "page", "place", "chambre", "nuit", "ligne", "pièce",
            "voiture", "réponse", "erreur", "tonne", "table", "étape", "adresse",
        ];
        let one = word.strip_suffix('s').unwrap_or(word);
        let known = ends_in(one, &FEMININE) || KNOWN.contains(&word) || KNOWN.contains(&one);
        known.then_some(true)
    }

    fn day(n: u128, _before: &str) -> String {
        if n == 1 { "premier".into() } else { words(n) }
    }

    fn clock(hour: u128, minute: u128) -> String {
        let hour = format!("{} heure{}", Self::counting(hour, true), if hour > 1 { "s" } else { "" });
        if minute == 0 { hour } else { format!("{hour} {}", words(minute)) }
    }

    fn ordinal(n: u128, _before: &str) -> String {
        nth(n)
    }

    fn fraction(top: u128, bottom: u128) -> String {
        let part = match bottom {
            2 => "demi".to_owned(),
            3 => "tiers".into(),
            4 => "quart".into(),
            _ => nth(bottom),
        };
        let plural = if top > 1 && !part.ends_with('s') { "s" } else { "" };
        format!("{} {part}{plural}", words(top))
    }

    fn mixed(whole: u128, top: u128, bottom: u128) -> String {
        let part = if (top, bottom) == (1, 2) { "demi".into() } else { Self::fraction(top, bottom) };
        format!("{} et {part}", Self::cardinal(whole))
    }

    fn part_of(part: Part, of: Measured<'_>, _first: bool) -> String {
        let half = (part.top, part.bottom) == (1, 2);
        let Some(whole) = part.whole else {
            return match half {
                true => format!("{} demi {}", if of.feminine { "une" } else { "un" }, of.one),
                false => format!("{} {}{}", Self::fraction(part.top, part.bottom), link(of.one), of.one),
            };
        };
        let noun = if whole < 2 { of.one } else { of.many };
        let part = match half {
            true if of.feminine => "demie".to_owned(),
            true => "demi".into(),
            false => Self::fraction(part.top, part.bottom),
        };
        format!("{} {noun} et {part}", Self::counting(whole, of.feminine))
    }

    fn measured(word: &str) -> Option<(String, bool)> {
        const NO_NOUNS: [&str; 18] = [
            "de", "du", "des", "la", "le", "les", "et", "ou", "en", "au", "aux", "par", "pour", "sur", "est", "sont",
            "plus", "moins",
        ];
        const FEMININE: [&str; 16] = [
            "tasse",
            "cuillère",
            "cuiller",
            "bouteille",
            "tablette",
            "dose",
            "livre",
            "gousse",
            "tranche",
            "boîte",
            "portion",
            "semaine",
            "botte",
            "louche",
            "part",
            "barquette",
        ];
        let one = word.strip_suffix('s').unwrap_or(word);
        let noun = word.starts_with(char::is_lowercase) && !NO_NOUNS.contains(&word);
        let feminine = FEMININE.contains(&one) || Self::counted(1, word) == Some(true);
        noun.then(|| (word.to_owned(), feminine))
    }

    fn link(noun: &str) -> Option<&'static str> {
        Some(link(noun))
    }

    fn follows_millions(word: &str) -> bool {
        const NO_NOUNS: [&str; 30] = [
            "plus", "moins", "mais", "dans", "sous", "vers", "depuis", "sans", "très", "après", "puis", "pas", "nous",
            "vous", "ils", "elles", "les", "des", "ces", "ses", "alors", "hors", "dès", "lors", "jamais", "toujours",
            "tous", "deux", "aux", "parfois",
        ];
        word.starts_with(char::is_lowercase) && word.ends_with(['s', 'x']) && !NO_NOUNS.contains(&word)
    }

    fn times(n: u128) -> String {
        format!("{} fois", Self::counting(n, true))
    }

    fn roman(value: u128, short: bool, context: &Context<'_>) -> Option<String> {
        const NUMBERED: [&str; 15] = [
            "chapitre", "tome", "acte", "scène", "volume", "livre", "partie", "article", "annexe", "titre", "phase",
            "niveau", "type", "figure", "tableau",
        ];
        const QUEENS: [&str; 4] = ["Élisabeth", "Elisabeth", "Catherine", "Marie"];
        let before = context.last_word();
        if NUMBERED.contains(&before.to_lowercase().as_str()) {
            return Some(words(value));
        }
        let ruler = RULERS.contains(&before) || QUEENS.contains(&before);
        // "XL" and "CV" are none; behind a name that is no ruler's one letter is a letter.
        if !ruler && (value >= 40 || short || !is_named(context)) {
            return None;
        }
        Some(match value {
            1 if QUEENS.contains(&before) => "première".into(),
            1 => "premier".into(),
            _ => words(value),
        })
    }

    fn own(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
        rule(numbers, "24 ?h(?:eures)?/24", |_, _| Some("vingt-quatre heures sur vingt-quatre".into()));
        rule(numbers, "7 ?j(?:ours)?/7", |_, _| Some("sept jours sur sept".into()));
        rule(numbers, r"(\d{1,2}) ?h ?(\d{1,2}) ?min", |c, _| {
            let minutes = Self::counting(number(&c[2]), true);
            let plural = if number(&c[2]) > 1 { "s" } else { "" };
            Some(format!("{} {minutes} minute{plural}", Self::clock(number(&c[1]), 0)))
        });
        // Numbers of telephones, in pairs, as they are read.
        rule(numbers, r"0[1-9](?:\.\d{2}){4}|0[1-9]\d{8}", |c, _| {
            let plain: Vec<char> = c[0].chars().filter(char::is_ascii_digit).collect();
            let pairs = plain.chunks(2).map(|pair| quantity::<Self>(&pair.iter().collect::<String>()));
            Some(pairs.collect::<Vec<_>>().join(", "))
        });
        rule(numbers, r"0 (8\d{2}) (\d{3}) (\d{3})", |c, _| {
            let group = |at: usize| {
                if c[at].starts_with('0') { super::digits::<Self>(&c[at]) } else { Self::cardinal(number(&c[at])) }
            };
            Some(format!("zéro {}, {}, {}", group(1), group(2), group(3)))
        });
        rule(numbers, r"(\d{1,9}(?:,\d{1,3})?) ?(M|Md|Mds)€", |c, _| {
            let one = number(&c[1]) < 2 || c[1].starts_with("1,");
            let size = if &c[2] == "M" { "million" } else { "milliard" };
            Some(format!("{} {size}{} d'euros", quantity::<Self>(&c[1]), if one { "" } else { "s" }))
        });
        super::loose(numbers, r"(\d{1,4}(?:,\d{1,3})?) ?(M|Mds?) (d['’]|de )", |c, _| {
            let one = number(&c[1]) < 2 || c[1].starts_with("1,");
            let size = if &c[2] == "M" { "million" } else { "milliard" };
            Some(format!("{} {size}{} {}", quantity::<Self>(&c[1]), if one { "" } else { "s" }, &c[3]))
        });
        rule(numbers, "2nd", |_, _| Some("second".into()));
        rule(numbers, "2nde", |_, _| Some("seconde".into()));
        rule(numbers, "1ers", |_, _| Some("premiers".into()));
        rule(numbers, r"1er|1ʳ?ᵉʳ", |_, _| Some("premier".into()));
        rule(numbers, r"1(?:ère|re)", |_, _| Some("première".into()));
        rule(numbers, r"(\d{1,6})(?:ème|e|ᵉ)", |c, _| Some(nth(number(&c[1]))));
        rule(numbers, r"(\d{1,2}) ?h(?: ?(\d{2}))? ?[-–] ?(\d{1,2}) ?h(?: ?(\d{2}))?", |c, _| {
            let (from, to) = (number(&c[1]), number(&c[3]));
            let clock = |hour, at| Self::clock(hour, minute_at(c, at));
            (from <= 24 && to <= 24).then(|| format!("{} à {}", clock(from, 2), clock(to, 4)))
        });
        rule(numbers, r"(\d{1,2}) ?h(?: ?(\d{2}))?", |c, _| {
            (number(&c[1]) <= 24).then(|| Self::clock(number(&c[1]), minute_at(c, 2)))
        });
        rule(
            numbers,
            r"(\d{1,2}) (janvier|février|mars|avril|mai|juin|juillet|août|septembre|octobre|novembre|décembre)(?: (\d{4}))?",
            |c, _| Some(format!("{} {}{}", Self::day(number(&c[1]), ""), &c[2], year_at::<Self>(c, 3))),
        );
        // "1 000 000": groups that a common space sets apart.
        rule(numbers, r"([1-9]\d{0,2}(?: \d{3})+)(?:,(\d+))?(?: ?([€$£]|[A-Za-z]{1,3}[²³]?|°C))?", |c, _| {
            let (bare, part) = (c[1].replace(' ', ""), group(c, 2));
            let whole = if part.is_empty() { bare.clone() } else { format!("{bare},{part}") };
            let Some(sign) = c.get(3) else { return Some(quantity::<Self>(&whole)) };
            if let Some((one, many, feminine)) = super::unit::<Self>(sign.as_str()) {
                return Some(counted::<Self>(&whole, one, many, feminine));
            }
            let money = MONEY.iter().find(|money| money.signs.contains(&sign.as_str()))?;
            Some(match part.len() {
                2 => Self::money(&bare, part, money),
                _ => counted::<Self>(&whole, money.one, money.many, money.feminine),
            })
        });
        super::loose(words, &days::pattern("(?:[lL]un|[mM]ar|[mM]er|[jJ]eu|[vV]en|[sS]am|[dD]im)"), |c, context| {
            days::say(&c[0], context.after, weekday, "à", "et")
        });
        // "ven. 9h", "sam., 5 mai"
        super::loose(words, r"([lL]un|[mM]ar|[mM]er|[jJ]eu|[vV]en|[sS]am|[dD]im)\.(,? )", |c, context| {
            let dated = context.next().is_some_and(|next| next.is_ascii_digit());
            dated.then(|| Some(format!("{}{}", weekday(&c[1])?, &c[2]))).flatten()
        });
        // The same before a word that is no unit.
        rule(numbers, r"([1-9]\d{0,2}(?: \d{3})+)(?:,(\d+))?", |c, _| {
            let bare = c[1].replace(' ', "");
            Some(quantity::<Self>(&if group(c, 2).is_empty() { bare } else { format!("{bare},{}", group(c, 2)) }))
        });
        // "XIXe siècle"; "Ce" and "Le" are words.
        rule(words, r"([IVXLC]{1,9})(er|re|ère|ème|e|ᵉ)", |c, _| {
            let value = crate::text::en::roman(&c[1])?;
            let first = matches!(&c[2], "er" | "re" | "ère");
            match (value, c[1].len()) {
                (1, _) if first => Some(if &c[2] == "er" { "premier" } else { "première" }.into()),
                (5 | 10, 1) if !first => Some(nth(value)),
                (_, 2..) if !first => Some(nth(value)),
                _ => None,
            }
        });
        rule(words, r"[nN][°º] ?(\d{1,6})", |c, _| Some(format!("numéro {}", quantity::<Self>(&c[1]))));
        super::loose(words, r"[nN][°º] ", |_, context| {
            context.next().is_some_and(char::is_alphabetic).then(|| "numéro ".into())
        });
        super::loose(words, r"av\. ?J\. ?-? ?C\.", |_, _| Some("avant Jésus-Christ".into()));
        rule(words, r"[pP]\. ?(\d{1,5})", |c, _| Some(format!("page {}", quantity::<Self>(&c[1]))));
        super::loose(words, "(St|Ste)-", |c, context| {
            let named = context.next().is_some_and(char::is_uppercase);
            named.then(|| if &c[1] == "St" { "Saint-" } else { "Sainte-" }.into())
        });
        rule(words, r"(Mme|Mlle|Mmes|Mr|Dr|Pr)", |c, _| {
            let long = match &c[1] {
                "Mr" => "Monsieur",
                "Mme" => "Madame",
                "Mmes" => "Mesdames",
                "Mlle" => "Mademoiselle",
                "Dr" => "Docteur",
                _ => "Professeur",
            };
            Some(long.into())
        });
        super::loose(words, r"M\. ", |_, context| {
            context.after.starts_with(char::is_uppercase).then(|| "Monsieur ".into())
        });
    }
}

#[rustfmt::skip]
const RULERS: &[&str] = &[
    "Louis", "Charles", "Henri", "François", "Philippe", "Napoléon", "Paul", "Jean", "Benoît", "Pie", "Léon", "Grégoire", "Clément",
    "Innocent", "Frédéric", "Guillaume", "Édouard", "George", "Georges", "Albert", "Léopold", "Ramsès", "Baudouin", "Nicolas", "Alexandre",
];

#[rustfmt::skip]
const UNITS: &[(&str, &str, &str, bool)] = &[
    ("kg", "kilogramme", "kilogrammes", false), ("g", "gramme", "grammes", false), ("mg", "milligramme", "milligrammes", false),
    ("t", "tonne", "tonnes", true), ("km", "kilomètre", "kilomètres", false), ("m", "mètre", "mètres", false),
    ("cm", "centimètre", "centimètres", false), ("mm", "millimètre", "millimètres", false), ("l", "litre", "litres", false),
    ("L", "litre", "litres", false), ("ml", "millilitre", "millilitres", false), ("cl", "centilitre", "centilitres", false),
    ("h", "heure", "heures", true), ("min", "minute", "minutes", true), ("s", "seconde", "secondes", true),
    ("ms", "milliseconde", "millisecondes", true), ("m²", "mètre carré", "mètres carrés", false),
    ("km²", "kilomètre carré", "kilomètres carrés", false), ("cm²", "centimètre carré", "centimètres carrés", false),
    ("m³", "mètre cube", "mètres cubes", false), ("°C", "degré Celsius", "degrés Celsius", false), ("℃", "degré Celsius", "degrés Celsius", false),
    ("°F", "degré Fahrenheit", "degrés Fahrenheit", false), ("°", "degré", "degrés", false), ("‰", "pour mille", "pour mille", false),
    ("Ko", "kilooctet", "kilooctets", false), ("Mo", "mégaoctet", "mégaoctets", false), ("Go", "gigaoctet", "gigaoctets", false),
    ("To", "téraoctet", "téraoctets", false), ("MB", "mégaoctet", "mégaoctets", false), ("GB", "gigaoctet", "gigaoctets", false),
    ("Hz", "hertz", "hertz", false), ("kHz", "kilohertz", "kilohertz", false), ("MHz", "mégahertz", "mégahertz", false),
    ("GHz", "gigahertz", "gigahertz", false), ("V", "volt", "volts", false), ("W", "watt", "watts", false), ("kW", "kilowatt", "kilowatts", false),
    ("kWh", "kilowattheure", "kilowattheures", false), ("ha", "hectare", "hectares", false), ("dB", "décibel", "décibels", false),
    ("càsoupe", "cuillère à soupe", "cuillères à soupe", true), ("càs", "cuillère à soupe", "cuillères à soupe", true),
    ("càcafé", "cuillère à café", "cuillères à café", true), ("càc", "cuillère à café", "cuillères à café", true),
    ("càthé", "cuillère à thé", "cuillères à thé", true),
    ("kcal", "kilocalorie", "kilocalories", true), ("kbit", "kilobit", "kilobits", false), ("Mbit", "mégabit", "mégabits", false),
    ("Gbit", "gigabit", "gigabits", false), ("Mbps", "mégabit par seconde", "mégabits par seconde", false),
];

const MONEY: &[Money] = &[
    money(&["€", "EUR"], "euro", "euros", ("centime", "centimes"), false),
    money(&["$", "US$", "USD"], "dollar", "dollars", ("cent", "cents"), false),
    money(&["£", "GBP"], "livre", "livres", ("penny", "pence"), true),
    money(&["¥", "JPY"], "yen", "yens", ("sen", "sens"), false),
    money(&["CHF"], "franc suisse", "francs suisses", ("centime", "centimes"), false),
];

#[rustfmt::skip]
const ABBREVIATIONS: &[(&str, &str)] = &[
    ("p.ex", "par exemple"), ("c.-à-d", "c'est-à-dire"), ("c.à.d", "c'est-à-dire"), ("av.j.-c", "avant Jésus-Christ"), ("etc", "et cetera"), ("env", "environ"),
    ("av", "avenue"), ("bd", "boulevard"), ("tél", "téléphone"), ("vol", "volume"), ("chap", "chapitre"), ("fig", "figure"),
    ("art", "article"), ("al", "alinéa"), ("ex", "exemple"), ("min", "minimum"), ("max", "maximum"), ("dr", "docteur"), ("mm", "messieurs"), ("st", "saint"),
    ("ste", "sainte"), ("cf", "confer"), ("éd", "édition"), ("dép", "département"), ("s.v.p", "s'il vous plaît"), ("r.s.v.p", "répondez s'il vous plaît"),
];
