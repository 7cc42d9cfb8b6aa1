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

#[test]
fn german_french_and_spanish_are_said_as_people_say_them() {
    check(include_str!("../../tests/data/text/de.tsv"), Language::German);
    check(include_str!("../../tests/data/text/fr.tsv"), Language::French);
    check(include_str!("../../tests/data/text/es.tsv"), Language::Spanish);
}

/// Where the published cases of NeMo's text processing (Apache-2.0) say otherwise; the file gives the reasons.
#[test]
fn what_is_said_otherwise_than_published_is_so_on_purpose() {
    check(include_str!("../../tests/data/text/otherwise.tsv"), Language::English);
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
        "Mo.-".repeat(1_000),
        "lun., ".repeat(700),
        "1 1/2 ".repeat(700),
        "1 000 ".repeat(700),
        "1½".repeat(1_000),
        "millions ".repeat(400),
    ];
    for flood in &floods {
        for language in LANGUAGES {
            let spoken = normalise(flood, language);
            // The longest words for a sign are some twenty bytes ("Bindestrich ", "soixante-dix-sept").
            assert!(spoken.text.len() <= flood.len() * 24 + 64, "{language:?}: {}", &flood[..8]);
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
