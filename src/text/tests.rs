use proptest::prelude::*;

use super::*;

const LANGUAGES: [Language; 7] = [
    Language::English,
    Language::Chinese,
    Language::Japanese,
    Language::German,
    Language::French,
    Language::Spanish,
    Language::Other,
];

/// Each line of a table: as written, a tab, as said.
fn check(table: &str, language: Language) {
    let mut wrong = Vec::new();
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with("## ")) {
        let (written, said) = line.split_once('\t').expect("a tab");
        let got = normalise(written, language).text;
        if got != said {
            wrong.push(format!("{written}\n    {said}\n  ≠ {got}"));
        }
    }
    assert!(wrong.is_empty(), "{} are said otherwise:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn english_is_said_as_people_say_it() {
    check(include_str!("../../tests/data/text/en.tsv"), Language::English);
}

#[test]
fn chinese_is_said_as_people_say_it() {
    check(include_str!("../../tests/data/text/zh.tsv"), Language::Chinese);
}

#[test]
fn japanese_is_said_as_people_say_it() {
    check(include_str!("../../tests/data/text/ja.tsv"), Language::Japanese);
}

/// Classes that the tables lack: shares of one another, doors, accounts, sides, pressure, signs by themselves.
#[test]
fn ratios_doors_accounts_and_signs_are_said() {
    check(
        concat!(
            "Mix them in a ratio of 4:1.\tMix them in a ratio of four to one.\n",
            "They tested H1N1 first.\tThey tested H one N one first.\n",
            "We watched R2-D2 on TV.\tWe watched R two D two on TV.\n",
            "It began in 2020-05.\tIt began in may twenty twenty.\n",
            "Sales of FY2023 are up.\tSales of FY twenty twenty three are up.\n",
            "It is 120/80 mmHg today.\tIt is one hundred and twenty over eighty millimeters of mercury today.\n",
            "The film is in 1080p.\tThe film is in ten eighty p.\n",
            "That is a 4K video.\tThat is a four K video.\n",
            "Show that a > b here.\tShow that a greater than b here.\n",
            "It is 10^-3 of that.\tIt is ten to the power of minus three of that.\n",
            "So E = mc² holds.\tSo E equals mc squared holds.\n",
            "Please call 911 now.\tPlease call nine one one now.\n",
            "Coffee w/ milk.\tCoffee with milk.\n",
            "He lives at 221B Baker St now.\tHe lives at two twenty one B Baker Street now.\n",
            "It was 45º warm.\tIt was forty five degrees warm.\n",
            "We need 12/kg of it.\tWe need twelve per kilogram of it.\n",
        ),
        Language::English,
    );
    check(
        concat!(
            "周1-周5上班\t周一到周五上班\n",
            "星期一至星期五营业\t星期一到星期五营业\n",
            "周三到一家店\t周三到一家店\n",
            "尺寸是10cm×20cm\t尺寸是十厘米乘二十厘米\n",
            "加我QQ123456吧\t加我QQ一二三四五六吧\n",
            "住在3单元501\t住在三单元五零一\n",
            "如果a>b成立\t如果a大于b成立\n",
            "计算√4的值\t计算根号四的值\n",
            "①选择语言\t一选择语言\n",
            "纪念9·18\t纪念九一八\n",
            "速度是100Mbps\t速度是一百兆比特每秒\n",
            "含量5mmol\t含量五毫摩尔\n",
        ),
        Language::Chinese,
    );
}

#[test]
fn german_french_and_spanish_are_said_as_people_say_them() {
    check(include_str!("../../tests/data/text/de.tsv"), Language::German);
    check(include_str!("../../tests/data/text/fr.tsv"), Language::French);
    check(include_str!("../../tests/data/text/es.tsv"), Language::Spanish);
}

/// What real bots write of hours, prices, codes and sizes in these languages; each was read wrong before.
#[test]
fn what_bots_write_in_german_french_and_spanish_is_said() {
    check(
        concat!(
            "Mo–Fr 8:00-18:00 Uhr\tMontag bis Freitag acht Uhr bis achtzehn Uhr\n",
            "Mo.–Fr. 9–17 Uhr\tMontag bis Freitag neun bis siebzehn Uhr\n",
            "Um 14.30 Uhr geht es los.\tUm vierzehn Uhr dreißig geht es los.\n",
            "Fr. Müller und Hr. Meier\tFrau Müller und Herr Meier\n",
            "am 8. Mai\tam achten Mai\n",
            "vom 1.-5. Mai\tvom ersten bis fünften Mai\n",
            "24.12.–31.12.\tvierundzwanzigster Dezember bis einunddreißigster Dezember\n",
            "Die Bestellnummer ist 4711-0815.\tDie Bestellnummer ist vier sieben eins eins, null acht eins fünf.\n",
            "Der Code lautet 4-8-1-5.\tDer Code lautet vier, acht, eins, fünf.\n",
            "Der Code ist 4815.\tDer Code ist vier acht eins fünf.\n",
            "Das war im Jahr 1815.\tDas war im Jahr achtzehnhundertfünfzehn.\n",
            "Tel.: (030) 1234567\tTelefon: null drei null, eins zwei drei vier fünf sechs sieben\n",
            "CHF 5.50 oder 5'000 Franken\tfünf Franken fünfzig oder fünftausend Franken\n",
            "1.299 €\teintausendzweihundertneunundneunzig Euro\n",
            "4,99 €/Monat\tvier Euro neunundneunzig pro Monat\n",
            "24/7 erreichbar\tvierundzwanzig sieben erreichbar\n",
            "1 1/2 Stunden\teineinhalb Stunden\n",
            "3/4 Stunde\teine Dreiviertelstunde\n",
            "10x20 cm\tzehn mal zwanzig Zentimeter\n",
            "+5 °C\tplus fünf Grad Celsius\n",
            "100 Mbit/s\teinhundert Megabit pro Sekunde\n",
            "Es steht 3:2.\tEs steht drei zu zwei.\n",
            "Ludwig XIV. war König.\tLudwig der Vierzehnte war König.\n",
            "Hauptstr. 12\tHauptstraße zwölf\n",
            "Warten Sie 10 Min. auf uns.\tWarten Sie zehn Minuten auf uns.\n",
            "#1 gem. S. 15\tNummer eins gemäß Seite fünfzehn\n",
        ),
        Language::German,
    );
    check(
        concat!(
            "Le rendez-vous est le 12/03 à 9h30.\tLe rendez-vous est le douze mars à neuf heures trente.\n",
            "Prenez 1/2 du gâteau.\tPrenez un demi du gâteau.\n",
            "Ouvert de 9:00-18:00\tOuvert de neuf heures à dix-huit heures\n",
            "24h/24 et 7j/7\tvingt-quatre heures sur vingt-quatre et sept jours sur sept\n",
            "19,99 €/mois\tdix-neuf euros quatre-vingt-dix-neuf par mois\n",
            "50 M€\tcinquante millions d'euros\n",
            "Appelez le 06.12.34.56.78.\tAppelez le zéro six, douze, trente-quatre, cinquante-six, soixante-dix-huit.\n",
            "Votre code est 4815.\tVotre code est quatre huit un cinq.\n",
            "le code civil de 1804\tle code civil de mille huit cent quatre\n",
            "1h 30 min\tune heure trente minutes\n",
            "la 2nde fois\tla seconde fois\n",
            "Mr Dupont, p. 12, à St-Denis\tMonsieur Dupont, page douze, à Saint-Denis\n",
            "10 x 20 cm\tdix fois vingt centimètres\n",
        ),
        Language::French,
    );
    check(
        concat!(
            "La cita es el 12/03 a las 9:30.\tLa cita es el doce de marzo a las nueve y treinta.\n",
            "Abierto de 9:00-18:00\tAbierto de nueve en punto a dieciocho en punto\n",
            "a las 3:30 p.m. o a las 8 a. m. hoy\ta las tres y treinta de la tarde o a las ocho de la mañana hoy\n",
            "Cuesta $19.99 o $1,299.50.\tCuesta diecinueve dólares con noventa y nueve o mil doscientos noventa y nueve dólares con cincuenta.\n",
            "19,99 €/mes\tdiecinueve euros con noventa y nueve por mes\n",
            "3er piso, 2da vez, 4to, 7mo\ttercer piso, segunda vez, cuarto, séptimo\n",
            "El código es 4815.\tEl código es cuatro ocho uno cinco.\n",
            "C.P. 28001\tcódigo postal dos ocho cero cero uno\n",
            "1 1/2 tazas\tuna y media tazas\n",
            "No. 12\tnúmero doce\n",
        ),
        Language::Spanish,
    );
    check(
        concat!(
            "The sale ends on 3/15.\tThe sale ends on the fifteenth of march.\n",
            "He ate 3/15 of it.\tHe ate three fifteenths of it.\n",
            "Since 9/11 it changed.\tSince nine eleven it changed.\n",
            "We meet 12-15 Jan 2025.\tWe meet the twelfth to the fifteenth of january twenty twenty five.\n",
            "Your card expires 08/27.\tYour card expires oh eight twenty seven.\n",
            "Valid until 05/2024.\tValid until may twenty twenty four.\n",
        ),
        Language::English,
    );
}

/// Where the published cases of NeMo's text processing (Apache-2.0) say otherwise, and why a caller hears this.
#[test]
fn what_is_said_otherwise_than_published_is_so_on_purpose() {
    check(
        concat!(
            // "july twenty fifth twenty twelve" there, and in WeTextProcessing as here: one reading for both orders.
            "july 25 2012\tthe twenty fifth of july twenty twelve\n",
            // "eighteen thousand five hundred forty two" in some of its cases, with "and" in others: always with.
            "$18542\teighteen thousand five hundred and forty two dollars\n",
            // "two asterisk eight": a product.
            "2*8\ttwo times eight\n",
            // "three CC per S", "eighty S": the units that they are.
            "3 cc/s\tthree cubic centimeters per second\n",
            "80 s\teighty seconds\n",
            // "dollar twelve at twelve percent" of what is no price there.
            "@12\tat twelve\n",
            // "CS Lewis": the initials keep their stops, which the voice pauses at.
            "C. S. Lewis\tC. S. Lewis\n",
            // "one hundred and seventy - four five one nine zero": a span is said as one.
            "2-5\ttwo to five\n",
            // "t two thousand": a record's number is read by its digits.
            "my pnr is t2000\tmy pnr is t two zero zero zero\n",
            // "doctor Evil" there and here; "misses Norris" there.
            "Dr. Evil\tdoctor Evil\n",
            // "twelve inches" there: behind a number it closes a quotation more often.
            "He said \"12\" twice\tHe said \"twelve\" twice\n",
            // "minus thirty four" behind a question mark there; a unit below zero is "negative" in WeTextProcessing.
            "-5°C\tnegative five degrees Celsius\n",
            // "fifty dollars - one hundred dollars" in one case and "to" in another: "to".
            "$50.00-$100.00\tfifty dollars to one hundred dollars\n",
            // "CFL" and the like stay: how letters are said is the voice's.
            "DNA is\tDNA is\n",
        ),
        Language::English,
    );
}

/// What each file is asked to hold at least; the same cases are split everywhere in the tests of turns.
#[test]
fn there_are_a_thousand_cases() {
    let cases = |table: &str| table.lines().filter(|line| line.contains('\t')).count();
    let others = [
        include_str!("../../tests/data/text/ja.tsv"),
        include_str!("../../tests/data/text/de.tsv"),
        include_str!("../../tests/data/text/fr.tsv"),
        include_str!("../../tests/data/text/es.tsv"),
    ];
    assert!(cases(include_str!("../../tests/data/text/en.tsv")) >= 400);
    assert!(cases(include_str!("../../tests/data/text/zh.tsv")) >= 300);
    assert!(others.map(cases).iter().sum::<usize>() >= 300);
}

/// The spans cover both texts without gaps, at character boundaries.
fn assert_spans(written: &str, spoken: &Spoken) {
    let (mut read, mut said) = (0, 0);
    for span in &spoken.spans {
        assert_eq!((span.written.start, span.spoken.start), (read, said), "{written:?}");
        (read, said) = (span.written.end, span.spoken.end);
        assert!(written.is_char_boundary(read) && spoken.text.is_char_boundary(said), "{written:?}");
        if span.copied {
            assert_eq!(written[span.written.clone()], spoken.text[span.spoken.clone()]);
        }
    }
    assert_eq!((read, said), (written.len(), spoken.text.len()), "{written:?}");
}

#[test]
fn what_was_said_leads_back_to_what_was_written() {
    let written = "It costs $3.50 today.";
    let spoken = normalise(written, Language::English);
    assert_eq!(spoken.text, "It costs three dollars fifty cents today.");
    assert_spans(written, &spoken);
    let at = |said: &str| &written[..spoken.written_before(said.len())];
    assert_eq!(at("It costs"), "It costs");
    assert_eq!(at("It costs three dollars"), "It costs ", "half an amount is not heard");
    assert_eq!(at("It costs three dollars fifty cents"), "It costs $3.50");
    assert_eq!(at("It costs three dollars fifty cents today."), written);
    assert_eq!(spoken.written_before(0), 0);
}

#[test]
fn hostile_text_costs_time_in_proportion_to_its_length() {
    let floods = [
        "1".repeat(10_000),
        "1.".repeat(5_000),
        "1-".repeat(5_000),
        "-".repeat(10_000),
        "a.".repeat(5_000),
        "e\u{301}".repeat(2_500),
        "\u{301}".repeat(2_500),
        "\u{202e}1".repeat(2_500),
        "$".repeat(5_000),
        "<|endofprompt|>".repeat(300),
        "[[[[((((".repeat(500),
        "１２：３４".repeat(250),
        "\u{0}\u{7}\u{1b}[31m".repeat(500),
    ];
    for flood in &floods {
        for language in [Language::English, Language::Chinese, Language::Japanese] {
            let spoken = normalise(flood, language);
            assert!(spoken.text.len() <= flood.len() * 12 + 64, "{}", &flood[..8]);
        }
    }
}

#[test]
fn control_tokens_are_taken_out_of_any_text() {
    for (text, left) in [
        ("plain < text | here >", "plain < text | here >"),
        ("a <|endofprompt|> b", "a  b"),
        ("<|im_start|>system", "system"),
        ("<<|x|>|endofprompt|>", " endofprompt|>"),
        ("<|<|endofprompt|>|>", "|>"),
        ("<|never closed", "never closed"),
    ] {
        assert_eq!(without_tokens(text), left, "{text}");
        assert!(!without_tokens(text).contains("<|"));
    }
}

#[test]
fn a_text_is_read_in_the_language_it_is_given_or_shows() {
    let language = |text: &str, given| read(text, given, Normalise::On).language;
    assert_eq!(language("Das kostet 5 Euro.", None).as_deref(), Some("de"));
    assert_eq!(language("Das kostet 5 Euro.", Some("en-US")).as_deref(), Some("en-US"));
    assert_eq!(language("42", None), None);
    let said = |text: &str, how| read(text, None, how).spoken.text;
    assert_eq!(said("42", Normalise::On), "forty two");
    assert_eq!(said("Das kostet 5 Euro.", Normalise::On), "Das kostet fünf Euro.");
    assert_eq!(said("Das kostet 5 Euro.", Normalise::Reference), "Das kostet 5 Euro.");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn any_text_is_said_and_its_spans_hold(text in any::<String>()) {
        for language in LANGUAGES {
            assert_spans(&text, &normalise(&text, language));
        }
    }

    #[test]
    fn any_text_of_what_rules_look_for_is_said(text in "[0-9]{0,9}[-–/.:,' $€£¥%+=×~@#°²½x*a-cA-Kkmsthp年月日点時１：．\u{301}]{0,4}[0-9]{0,5}[-/.: a-z]{0,5}[0-9]{0,4}[a-z.年人]{0,3}") {
        for language in LANGUAGES {
            assert_spans(&text, &normalise(&text, language));
        }
    }
}

/// The model's own tags of sounds stay whole: their digits and marks are no text.
#[test]
fn tags_of_sounds_are_no_numbers() {
    for tag in ["[T][AH0][M][AA1][T][OW2]", "[j][ǐ]", "[ch][óng][q][ìng]"] {
        for language in LANGUAGES {
            assert_eq!(normalise(tag, language).text, tag);
        }
    }
    assert_eq!(normalise("Say [T][AH0] 2.", Language::English).text, "Say [T][AH0] two.");
    assert_eq!(normalise("[AH9] [AH0 [é", Language::English).text, "[AH nine] [AH zero [é");
}

#[test]
fn a_voice_without_tags_says_none() {
    for (text, left) in [
        ("It is [breath] <strong>good</strong>.", "It is  good."),
        ("[AA0] a [b c] < d > [", " a [b c] < d > ["),
        ("<<strong>>", "<>"),
        ("[<a>] [ä] []", "[] [ä] []"),
    ] {
        assert_eq!(without_tags(text), left);
    }
    let (name, long) = ("a".repeat(32), "a".repeat(33));
    assert_eq!(without_tags(&format!("[{name}]<{long}>")), format!("<{long}>"));
}
