//! Spanish.

use super::often::is_named;
use super::{Measured, Money, Part, Signs, Tongue, Words, ends_in, money, number, quantity, rule, year_at};
use crate::text::days;
use crate::text::scan::{Context, Rule};

pub(super) struct Spanish;

const SMALL: [&str; 30] = [
    "cero",
    "uno",
    "dos",
    "tres",
    "cuatro",
    "cinco",
    "seis",
    "siete",
    "ocho",
    "nueve",
    "diez",
    "once",
    "doce",
    "trece",
    "catorce",
    "quince",
    "dieciséis",
    "diecisiete",
    "dieciocho",
    "diecinueve",
    "veinte",
    "veintiuno",
    "veintidós",
    "veintitrés",
    "veinticuatro",
    "veinticinco",
    "veintiséis",
    "veintisiete",
    "veintiocho",
    "veintinueve",
];
const TENS: [&str; 10] = ["", "", "", "treinta", "cuarenta", "cincuenta", "sesenta", "setenta", "ochenta", "noventa"];
const HUNDREDS: [&str; 10] = [
    "",
    "ciento",
    "doscientos",
    "trescientos",
    "cuatrocientos",
    "quinientos",
    "seiscientos",
    "setecientos",
    "ochocientos",
    "novecientos",
];

fn tens(n: u64) -> String {
    match (n, n % 10) {
        (0..30, _) => SMALL[n as usize].into(),
        (_, 0) => TENS[n as usize / 10].into(),
        (_, one) => format!("{} y {}", TENS[n as usize / 10], SMALL[one as usize]),
    }
}

fn thousand(n: u64) -> String {
    match (n / 100, n % 100) {
        (1, 0) => "cien".into(),
        (0, rest) => tens(rest),
        (hundred, 0) => HUNDREDS[hundred as usize].into(),
        (hundred, rest) => format!("{} {}", HUNDREDS[hundred as usize], tens(rest)),
    }
}

/// Less than a million.
fn million(n: u64) -> String {
    let (thousands, rest) = (n / 1_000, n % 1_000);
    let mut said = match thousands {
        0 => String::new(),
        1 => "mil".into(),
        many => format!("{} mil", shorten(&thousand(many))),
    };
    if rest > 0 || n == 0 {
        if !said.is_empty() {
            said.push(' ');
        }
        said.push_str(&thousand(rest));
    }
    said
}

/// A one before a noun: "un", "veintiún".
fn shorten(said: &str) -> String {
    match said.strip_suffix("veintiuno") {
        Some(head) => format!("{head}veintiún"),
        None => said.strip_suffix("uno").map_or_else(|| said.to_owned(), |head| format!("{head}un")),
    }
}

fn words(n: u128) -> String {
    let mut said = Vec::new();
    for (size, one, many) in [(1_000_000_000_000_u128, "un billón", "billones"), (1_000_000, "un millón", "millones")]
    {
        match (n / size % 1_000_000) as u64 {
            0 => {}
            1 => said.push(one.to_owned()),
            n => said.push(format!("{} {many}", shorten(&million(n)))),
        }
    }
    let rest = (n % 1_000_000) as u64;
    if rest > 0 || n == 0 {
        said.push(million(rest));
    }
    said.join(" ")
}

/// "tercero", up to ten; larger ones are read as quantities, as people do.
fn nth(n: u128, feminine: bool) -> String {
    const FIRST: [&str; 11] =
        ["", "primero", "segundo", "tercero", "cuarto", "quinto", "sexto", "séptimo", "octavo", "noveno", "décimo"];
    let said = match FIRST.get(n as usize) {
        Some(word) if n > 0 => (*word).to_owned(),
        _ => return words(n),
    };
    if feminine { format!("{}a", said.trim_end_matches('o')) } else { said }
}

fn weekday(short: &str) -> Option<&'static str> {
    const DAYS: [&str; 7] = ["lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo"];
    let short = short.to_lowercase();
    match short.as_str() {
        "mie" => Some("miércoles"),
        "sab" => Some("sábado"),
        _ => DAYS.into_iter().find(|day| day.starts_with(&short)),
    }
}

/// The first letters of the days that hours of shops begin and end with.
fn initial(short: &str) -> Option<&'static str> {
    Some(match short {
        "L" => "lunes",
        "J" => "jueves",
        "V" => "viernes",
        "S" => "sábado",
        "D" => "domingo",
        _ => return None,
    })
}

impl Tongue for Spanish {
    const WORDS: Words = Words {
        point: "coma",
        minus: "menos",
        plus: "más",
        to: "a",
        percent: "por ciento",
        times: "por",
        divided: "entre",
        equals: "igual a",
        and: "y",
        ratio: "a",
        number: "número",
        codes: &[
            "código",
            "pin",
            "postal",
            "cp",
            "pedido",
            "reserva",
            "referencia",
            "expediente",
            "cliente",
            "cuenta",
            "factura",
            "tique",
            "vuelo",
            "iban",
        ],
        before_days: &["el", "del", "al", "lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo"],
        section: ["párrafo", "párrafos"],
        signs: Signs { at: "arroba", dot: "punto", slash: "barra", dash: "guion", underscore: "guion bajo" },
        per: "por",
        months: [
            "enero",
            "febrero",
            "marzo",
            "abril",
            "mayo",
            "junio",
            "julio",
            "agosto",
            "septiembre",
            "octubre",
            "noviembre",
            "diciembre",
        ],
        units: UNITS,
        money: MONEY,
        before_cents: "con ",
        abbreviations: ABBREVIATIONS,
    };

    fn cardinal(n: u128) -> String {
        words(n)
    }

    fn counting(n: u128, feminine: bool) -> String {
        let said = words(n);
        if !feminine {
            return shorten(&said);
        }
        // "doscientas", "quinientas"
        let said = said.replace("ientos", "ientas");
        match said.strip_suffix("uno") {
            Some(head) => format!("{head}una"),
            None => said,
        }
    }

    fn counted(n: u128, word: &str) -> Option<bool> {
        const NO_NOUNS: [&str; 17] = [
            "por", "con", "que", "más", "del", "para", "como", "sobre", "entre", "hasta", "desde", "cada", "pero",
            "sin", "los", "las", "menos",
        ];
        const FEMININE: [&str; 9] = ["a", "ción", "sión", "cion", "sion", "dad", "tad", "vez", "noche"];
        const KNOWN: [&str; 6] = ["tarde", "calle", "llave", "clase", "parte", "vece"];
        const MASCULINE: [&str; 7] = ["día", "mapa", "problema", "programa", "sistema", "tema", "idioma"];
        let long = word.chars().count() >= 3 && word.chars().all(char::is_lowercase);
        let noun = long && !NO_NOUNS.contains(&word) && (n == 1 || word.ends_with('s'));
        // "horas" to "hora", "estaciones" to "estacion".
        let one = if n == 1 { word } else { word.strip_suffix('s').unwrap_or(word) };
        let stem = one.strip_suffix('e').filter(|stem| ends_in(stem, &FEMININE[1..])).unwrap_or(one);
        let feminine = ends_in(stem, &FEMININE) && !MASCULINE.contains(&stem) || KNOWN.contains(&one);
        noun.then_some(feminine)
    }

    fn day(n: u128, _before: &str) -> String {
        format!("{} de", if n == 1 { "primero".into() } else { words(n) })
    }

    fn clock(hour: u128, minute: u128) -> String {
        let hour = Self::counting(hour, true);
        if minute == 0 { format!("{hour} en punto") } else { format!("{hour} y {}", words(minute)) }
    }

    fn ordinal(n: u128, _before: &str) -> String {
        nth(n, false)
    }

    fn fraction(top: u128, bottom: u128) -> String {
        let part = match bottom {
            2 => "medio".to_owned(),
            3 => "tercio".into(),
            4..=10 => nth(bottom, false),
            _ => format!("{}avo", words(bottom).replace(' ', "")),
        };
        format!("{} {part}{}", shorten(&words(top)), if top > 1 { "s" } else { "" })
    }

    fn mixed(whole: u128, top: u128, bottom: u128) -> String {
        let part = if (top, bottom) == (1, 2) { "medio".into() } else { Self::fraction(top, bottom) };
        format!("{} y {part}", words(whole))
    }

    fn part_of(part: Part, of: Measured<'_>, _first: bool) -> String {
        let half = match of.feminine {
            _ if (part.top, part.bottom) != (1, 2) => None,
            true => Some("media"),
            false => Some("medio"),
        };
        match (part.whole, half) {
            (None, Some(half)) => format!("{half} {}", of.one),
            (None, None) => format!("{} de {}", Self::fraction(part.top, part.bottom), of.one),
            (Some(whole), half) => {
                let noun = if whole == 1 { of.one } else { of.many };
                let part = half.map_or_else(|| Self::fraction(part.top, part.bottom), str::to_owned);
                format!("{} {noun} y {part}", Self::counting(whole, of.feminine))
            }
        }
    }

    fn measured(word: &str) -> Option<(String, bool)> {
        let one = match word.strip_suffix('s') {
            Some(one) if one.ends_with(['a', 'o']) => one,
            _ => word,
        };
        Self::counted(1, one).map(|feminine| (one.to_owned(), feminine))
    }

    fn link(_noun: &str) -> Option<&'static str> {
        Some("de ")
    }

    fn follows_millions(word: &str) -> bool {
        const NO_NOUNS: [&str; 12] =
            ["más", "menos", "después", "antes", "las", "los", "entonces", "tras", "además", "veces más", "es", "nos"];
        word.starts_with(char::is_lowercase) && word.len() > 3 && word.ends_with('s') && !NO_NOUNS.contains(&word)
    }

    fn times(n: u128) -> String {
        format!("{} {}", Self::counting(n, true), if n == 1 { "vez" } else { "veces" })
    }

    fn roman(value: u128, short: bool, context: &Context<'_>) -> Option<String> {
        const NUMBERED: [&str; 15] = [
            "capítulo",
            "tomo",
            "volumen",
            "libro",
            "parte",
            "acto",
            "escena",
            "artículo",
            "anexo",
            "título",
            "fase",
            "nivel",
            "tipo",
            "figura",
            "sección",
        ];
        const RULERS: [&str; 14] = [
            "Felipe",
            "Carlos",
            "Alfonso",
            "Fernando",
            "Juan",
            "Pablo",
            "Pío",
            "Benedicto",
            "León",
            "Luis",
            "Enrique",
            "Jorge",
            "Jaime",
            "Sancho",
        ];
        const QUEENS: [&str; 5] = ["Isabel", "María", "Catalina", "Juana", "Margarita"];
        let before = context.last_word();
        if NUMBERED.contains(&before.to_lowercase().as_str()) {
            return Some(words(value));
        }
        // "siglos XIX y XX"
        let century = context.before.split_whitespace().rev().take(3).any(|word| matches!(word, "siglo" | "siglos"));
        if century && (!short || matches!(before, "siglo" | "siglos")) {
            return Some(nth(value, false));
        }
        let (king, queen) = (RULERS.contains(&before), QUEENS.contains(&before));
        let named = is_named(context) && !short && value < 40;
        (king || queen || named).then(|| nth(value, queen))
    }

    fn own(numbers: &mut Vec<Rule>, words: &mut Vec<Rule>) {
        // "3 p. m.", "3:30pm": the part of the day in words.
        super::loose(numbers, r"(\d{1,2})(?::(\d{2}))? ?([aApP])(?:\. ?[mM](\.?)|[mM])", |c, context| {
            let (hour, minute) = (number(&c[1]), super::minute_at(c, 2));
            let carried = context.next().is_some_and(char::is_alphanumeric);
            ((1..=12).contains(&hour) && minute < 60 && !carried).then_some(())?;
            let part = match (c[3].eq_ignore_ascii_case("a"), hour) {
                (true, _) => "de la mañana",
                (false, 12) => "del mediodía",
                (false, 8..) => "de la noche",
                (false, _) => "de la tarde",
            };
            let minute = if minute == 0 { String::new() } else { format!(" y {}", Self::cardinal(minute)) };
            let end =
                if c.get(4).is_some_and(|stop| !stop.is_empty()) && context.after.trim().is_empty() { "." } else { "" };
            Some(format!("{}{minute} {part}{end}", Self::counting(hour, true)))
        });
        // "1er piso", "2da vez"
        rule(numbers, r"(\d{1,3})(er|ra|ro|do|da|to|ta|mo|ma|vo|va|no|na)", |c, _| {
            let (n, end) = (number(&c[1]), &c[2]);
            let fits = match end {
                "er" => return matches!(n % 10, 1 | 3).then(|| nth(n, false).trim_end_matches('o').to_owned()),
                "ra" | "ro" => matches!(n % 10, 1 | 3),
                "do" | "da" => n % 10 == 2,
                "to" | "ta" => matches!(n % 10, 4..=6),
                "mo" | "ma" => matches!(n % 10, 7 | 0),
                "vo" | "va" => n % 10 == 8,
                _ => n % 10 == 9,
            };
            fits.then(|| nth(n, end.ends_with('a')))
        });
        rule(numbers, r"(\d{1,4})\.?([ºª°])", |c, context| {
            // Behind a number a degree sign may mean degrees: an ordinal has a noun behind it or a stop before.
            let ordinal = &c[2] != "°" || context.next_word().starts_with(char::is_lowercase);
            ordinal.then(|| nth(number(&c[1]), &c[2] == "ª"))
        });
        rule(
            numbers,
            r"(\d{1,2}) de (enero|febrero|marzo|abril|mayo|junio|julio|agosto|sep?tiembre|octubre|noviembre|diciembre)(?: del? (\d{4}))?",
            |c, _| Some(format!("{} {}{}", Self::day(number(&c[1]), ""), &c[2], year_at::<Self>(c, 3))),
        );
        rule(numbers, r"(\d{1,6}(?:,\d{1,3})?) ?(M|millón|millones) ?€", |c, _| {
            let size = if &c[1] == "1" { "millón" } else { "millones" };
            let amount = if &c[1] == "1" { "un".into() } else { quantity::<Self>(&c[1]) };
            Some(format!("{amount} {size} de euros"))
        });
        super::loose(
            words,
            &days::pattern("(?:[lL]un|[mM]ar|[mM]i[eé]|[jJ]ue|[vV]ie|[sS][aá]b|[dD]om)"),
            |c, context| days::say(&c[0], context.after, weekday, "a", "y"),
        );
        super::loose(words, r"([lL]un|[mM]ar|[mM]i[eé]|[jJ]ue|[vV]ie|[sS][aá]b|[dD]om)\.(,? )", |c, context| {
            let dated = context.next().is_some_and(|next| next.is_ascii_digit());
            dated.then(|| Some(format!("{}{}", weekday(&c[1])?, &c[2]))).flatten()
        });
        rule(words, r"(L)(?: ?[-–] ?| a )([JVSD])|(S)(?: ?[-–] ?| a )(D)", |c, _| {
            let (from, to) = (c.get(1).or(c.get(3))?, c.get(2).or(c.get(4))?);
            Some(format!("{} a {}", initial(from.as_str())?, initial(to.as_str())?))
        });
        super::loose(words, r"C\. ?P\.", |_, _| Some("código postal".into()));
        rule(words, r"(?:[nN]\.?[°º]|[nN]úm\.|No\.) ?(\d{1,6})", |c, _| {
            Some(format!("número {}", quantity::<Self>(&c[1])))
        });
    }
}

#[rustfmt::skip]
const UNITS: &[(&str, &str, &str, bool)] = &[
    ("kg", "kilogramo", "kilogramos", false), ("g", "gramo", "gramos", false), ("mg", "miligramo", "miligramos", false),
    ("t", "tonelada", "toneladas", true), ("km", "kilómetro", "kilómetros", false), ("m", "metro", "metros", false),
    ("cm", "centímetro", "centímetros", false), ("mm", "milímetro", "milímetros", false), ("l", "litro", "litros", false),
    ("L", "litro", "litros", false), ("ml", "mililitro", "mililitros", false), ("h", "hora", "horas", true), ("min", "minuto", "minutos", false),
    ("s", "segundo", "segundos", false), ("ms", "milisegundo", "milisegundos", false), ("m²", "metro cuadrado", "metros cuadrados", false),
    ("km²", "kilómetro cuadrado", "kilómetros cuadrados", false), ("cm²", "centímetro cuadrado", "centímetros cuadrados", false),
    ("m³", "metro cúbico", "metros cúbicos", false), ("°C", "grado Celsius", "grados Celsius", false), ("℃", "grado Celsius", "grados Celsius", false),
    ("°F", "grado Fahrenheit", "grados Fahrenheit", false), ("°", "grado", "grados", false), ("‰", "por mil", "por mil", false),
    ("kB", "kilobyte", "kilobytes", false), ("MB", "megabyte", "megabytes", false), ("GB", "gigabyte", "gigabytes", false),
    ("TB", "terabyte", "terabytes", false), ("Hz", "hercio", "hercios", false), ("kHz", "kilohercio", "kilohercios", false),
    ("MHz", "megahercio", "megahercios", false), ("GHz", "gigahercio", "gigahercios", false), ("V", "voltio", "voltios", false),
    ("W", "vatio", "vatios", false), ("kW", "kilovatio", "kilovatios", false), ("kWh", "kilovatio hora", "kilovatios hora", false),
    ("ha", "hectárea", "hectáreas", true), ("dB", "decibelio", "decibelios", false), ("kcal", "kilocaloría", "kilocalorías", true),
    ("kbit", "kilobit", "kilobits", false), ("Mbit", "megabit", "megabits", false), ("Gbit", "gigabit", "gigabits", false),
    ("cda", "cucharada", "cucharadas", true), ("cdas", "cucharada", "cucharadas", true),
    ("cdta", "cucharadita", "cucharaditas", true), ("cdtas", "cucharadita", "cucharaditas", true),
    ("cdita", "cucharadita", "cucharaditas", true), ("cditas", "cucharadita", "cucharaditas", true),
    ("Mbps", "megabit por segundo", "megabits por segundo", false),
];

const MONEY: &[Money] = &[
    money(&["€", "EUR"], "euro", "euros", ("céntimo", "céntimos"), false),
    money(&["$", "US$", "USD"], "dólar", "dólares", ("centavo", "centavos"), false),
    money(&["£", "GBP"], "libra", "libras", ("penique", "peniques"), true),
    money(&["¥", "JPY"], "yen", "yenes", ("sen", "senes"), false),
    money(&["CHF"], "franco suizo", "francos suizos", ("céntimo", "céntimos"), false),
];

#[rustfmt::skip]
const ABBREVIATIONS: &[(&str, &str)] = &[
    ("sr", "señor"), ("sra", "señora"), ("srta", "señorita"), ("sres", "señores"), ("dr", "doctor"), ("dra", "doctora"), ("prof", "profesor"),
    ("ud", "usted"), ("uds", "ustedes"), ("etc", "etcétera"), ("p.ej", "por ejemplo"), ("ee.uu", "Estados Unidos"), ("núm", "número"),
    ("pág", "página"), ("págs", "páginas"), ("av", "avenida"), ("avda", "avenida"), ("tel", "teléfono"), ("aprox", "aproximadamente"),
    ("a.c", "antes de Cristo"), ("d.c", "después de Cristo"), ("cap", "capítulo"), ("vol", "volumen"), ("art", "artículo"), ("máx", "máximo"),
    ("mín", "mínimo"), ("gral", "general"), ("dpto", "departamento"), ("s.a", "sociedad anónima"), ("st", "santo"), ("sto", "santo"), ("sta", "santa"),
];
