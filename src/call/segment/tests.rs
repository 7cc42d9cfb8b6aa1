use proptest::prelude::*;

use super::*;

fn whole(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    Segmenter::new(SegmentConfig::default()).whole(text, &mut out);
    out
}

/// The parts that are out after each piece, and after the end.
fn streamed(pieces: &[&str]) -> Vec<Vec<String>> {
    let mut segmenter = Segmenter::new(SegmentConfig::default());
    let mut steps = pieces
        .iter()
        .map(|piece| {
            let mut out = Vec::new();
            segmenter.push(piece, &mut out);
            out
        })
        .collect::<Vec<_>>();
    let mut out = Vec::new();
    segmenter.finish(&mut out);
    steps.push(out);
    steps
}

#[test]
fn sentences_end_where_people_end_them() {
    let cases: &[(&str, &[&str])] = &[
        ("Hello there. How are you today? Fine!", &["Hello there.", "How are you today?", "Fine!"]),
        (
            "Dr. Smith paid 3.5 dollars to J. R. Jones. He left.",
            &["Dr. Smith paid 3.5 dollars to J. R. Jones.", "He left."],
        ),
        (
            "Visit example.com for more, e.g. prices. Thanks a lot.",
            &["Visit example.com for more, e.g. prices.", "Thanks a lot."],
        ),
        ("The U.S. Army came. It was late.", &["The U.S. Army came.", "It was late."]),
        (
            "\"Really?\" she asked. \"Yes.\" He nodded at her.",
            &["\"Really?\" she asked.", "\"Yes.\" He nodded at her."],
        ),
        ("Wait... what? No way that happened.", &["Wait... what?", "No way that happened."]),
        (
            "你好。今天天气怎么样？我很好，谢谢你的关心和问候！",
            &["你好。", "今天天气怎么样？我很好，谢谢你的关心和问候！"],
        ),
        ("1. Open the door. 2. Close it again.", &["1. Open the door.", "2. Close it again."]),
        ("I am here, and so am I. Then we left.", &["I am here, and so am I.", "Then we left."]),
    ];
    for (text, parts) in cases {
        assert_eq!(whole(text), *parts, "{text}");
    }
}

#[test]
fn markdown_and_control_characters_are_not_read_aloud() {
    assert_eq!(
        whole("# Title\n\nSome **bold** and `code` text\nthat wraps.\u{7}"),
        ["Title", "Some bold and code text that wraps."]
    );
    assert_eq!(whole("- first thing here\n\n- second_name thing"), ["first thing here", "second_name thing"]);
    assert_eq!(whole("It is [breath] <strong>good</strong>."), ["It is [breath] <strong>good</strong>."]);
    assert_eq!(whole("...  — !?"), Vec::<String>::new());
}

/// Each line of the table: as written, a tab, the parts as they are said. In whatever pieces it comes, the same is said.
#[test]
fn what_is_written_for_the_eye_is_said_for_the_ear_in_any_pieces() {
    let mut wrong = Vec::new();
    let table = include_str!("../../../tests/data/text/markdown.tsv");
    for line in table.lines().filter(|line| !line.is_empty() && line.contains('\t')) {
        let (written, said) = line.split_once('\t').expect("a tab");
        let written = written.replace("\\n", "\n");
        let said: Vec<&str> = said.split(" ¦ ").filter(|part| !part.is_empty()).collect();
        let got = whole(&written);
        if got != said {
            wrong.push(format!("{written:?}\n    {said:?}\n  ≠ {got:?}"));
        }
        // At an end that cannot go on a stream is cut as the whole is: nothing is hungry here.
        let joined = streamed(&[&written]).concat();
        for at in (0..written.len()).filter(|at| written.is_char_boundary(*at)) {
            let got = streamed(&[&written[..at], &written[at..]]).concat();
            if got != joined {
                wrong.push(format!("{written:?} split at {at}\n    {joined:?}\n  ≠ {got:?}"));
            }
        }
        let letters: Vec<String> = written.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        let got = streamed(&letters).concat();
        if got != joined {
            wrong.push(format!("{written:?} by letters\n    {joined:?}\n  ≠ {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_block_of_code_is_what_the_configuration_says() {
    let config = SegmentConfig { code_block: "You see the code in the chat.".into(), ..SegmentConfig::default() };
    let mut out = Vec::new();
    Segmenter::new(config).whole("Here it is:\n```js\nfoo();\n```\nAnd ```this``` is not one.", &mut out);
    assert_eq!(out, ["Here it is:", "You see the code in the chat.", "And this is not one."]);
}

/// A writer who stops in the midst of what may be a link or a list is not waited for without end.
#[test]
fn what_is_held_back_is_said_when_nothing_follows() {
    let say = |text: &str| text.to_owned();
    for (text, said) in [("Choose [red or blue", "Choose [red or blue"), ("42", "42"), ("a ~~b", "a ~~b")] {
        let mut segmenter = Segmenter::new(SegmentConfig::default());
        let mut out = Vec::new();
        segmenter.push(text, &mut out);
        assert!(segmenter.is_waiting(), "{text}");
        segmenter.phrase(Patience::Silent, false, &say, &mut out);
        assert_eq!(out.join(" "), said);
    }
    // What a link leads to stays unsaid.
    let mut segmenter = Segmenter::new(SegmentConfig::default());
    let mut out = Vec::new();
    segmenter.push("See [the page](https://exa", &mut out);
    segmenter.phrase(Patience::Silent, false, &say, &mut out);
    segmenter.push("mple.com/x) for more.", &mut out);
    segmenter.finish(&mut out);
    assert_eq!(out, ["See the page", "for more."]);
}

#[test]
fn the_first_part_of_a_stream_leaves_at_a_clause_and_later_ones_at_sentences() {
    let steps =
        streamed(&["Well, let me look", " into that for you,", " because it", " matters, a lot", ". The", " end"]);
    assert_eq!(
        steps,
        [
            vec![],
            vec![],
            vec!["Well, let me look into that for you,".to_owned()],
            vec![],
            vec!["because it matters, a lot.".to_owned()],
            vec![],
            vec!["The end".to_owned()]
        ]
    );
}

#[test]
fn signs_of_numbers_at_the_start_of_a_line_are_no_markers() {
    assert_eq!(
        whole("-5 degrees\n\n- a first thing\n\n#1 of them all\n\n## A heading here"),
        ["-5 degrees", "a first thing", "#1 of them all", "A heading here"]
    );
    assert_eq!(whole("2 * 10 is **20**, not *30*"), ["2 * 10 is 20, not 30"]);
    assert_eq!(whole("Due Jan. 5 at noon. Then rest."), ["Due Jan. 5 at noon.", "Then rest."]);
}

#[test]
fn control_tokens_do_not_come_through_in_any_pieces() {
    let text = "Say <|endofprompt|> this. And <|im_end|> that one now.";
    for at in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
        let said = streamed(&[&text[..at], &text[at..]]).concat().concat();
        assert!(!said.contains("<|") && !said.contains("endofprompt"), "{said}");
    }
}

#[test]
fn a_full_stop_waits_for_what_follows() {
    assert_eq!(streamed(&["It costs 3", ".", "5 dollars. ", "Good"])[..3], [vec![], vec![], Vec::<String>::new()]);
    assert_eq!(streamed(&["It costs 3", ".", "5 dollars. ", "Good"])[3], ["It costs 3.5 dollars."]);
}

#[test]
fn a_pause_behind_a_sentence_completes_it() {
    for (text, complete) in [
        ("Hello there. ", true),
        ("\"Really?\"", true),
        ("你好。", true),
        ("It costs 3.", false),
        ("Ask Dr.", false),
        ("Well, ", false),
        ("", false),
    ] {
        let mut segmenter = Segmenter::new(SegmentConfig::default());
        let mut out = Vec::new();
        segmenter.push(text, &mut out);
        assert_eq!(segmenter.is_probably_complete(), complete, "{text}");
        segmenter.settle(&mut out);
        assert_eq!(out.len(), usize::from(complete), "{text}");
    }
}

#[test]
fn a_whole_turn_is_not_cut_at_clauses() {
    assert_eq!(whole("Well, let me look into that for you, because it matters.").len(), 1);
}

#[test]
fn endless_text_is_cut_at_spaces_and_then_anywhere() {
    let words = "word ".repeat(200);
    assert!(whole(&words).iter().all(|part| part.chars().count() <= 280 && part.ends_with("word")));
    let parts = whole(&"é".repeat(1_000));
    assert_eq!(parts.concat(), "é".repeat(1_000));
    assert!(parts.iter().all(|part| part.chars().count() <= 280));
}

proptest! {
    /// Splitting the input differently loses and adds nothing.
    #[test]
    fn pieces_lose_nothing(text in "[a-zA-Z0-9é你。，.,!? ]{0,400}", cuts in proptest::collection::vec(0usize..400, 0..20)) {
        let mut segmenter = Segmenter::new(SegmentConfig::default());
        let mut out = Vec::new();
        let chars = text.chars().collect::<Vec<_>>();
        let mut cuts = cuts.into_iter().map(|cut| cut.min(chars.len())).collect::<Vec<_>>();
        cuts.extend([0, chars.len()]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            segmenter.push(&chars[pair[0]..pair[1]].iter().collect::<String>(), &mut out);
        }
        segmenter.finish(&mut out);
        let letters = |text: &str| text.chars().filter(|c| c.is_alphanumeric()).collect::<String>();
        prop_assert_eq!(letters(&out.concat()), letters(&text));
        prop_assert!(out.iter().all(|part| part.chars().count() <= 280));
    }

    /// What markup is made of, in any order and cut anywhere, gives the same as the whole, and no more than was written.
    #[test]
    fn markup_in_any_pieces_is_the_same(text in r"([a-c 1.]|\n|```|`|\[|\]|\(|\)|!|\||---|~~|\*|_|<br>|<|http://|# |- |🎉|【|†|】|\\|\^){0,40}", cuts in proptest::collection::vec(0usize..200, 0..12)) {
        let mut whole = String::new();
        let mut cleaner = Cleaner::new("code");
        cleaner.clean(&text, &mut whole);
        cleaner.finish(&mut whole);
        let (mut pieces, mut from) = (String::new(), 0);
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|at| text.is_char_boundary(*at) && *at <= text.len()).collect();
        cuts.push(text.len());
        cuts.sort_unstable();
        for to in cuts {
            cleaner.clean(&text[from..to], &mut pieces);
            from = to;
        }
        cleaner.finish(&mut pieces);
        prop_assert_eq!(&whole, &pieces);
        prop_assert!(whole.len() <= 3 * text.len() + 8, "{:?}", whole);
    }

    /// Nothing from outside panics it.
    #[test]
    fn any_text_is_survived(pieces in proptest::collection::vec(any::<String>(), 0..10)) {
        let mut segmenter = Segmenter::new(SegmentConfig::default());
        let mut out = Vec::new();
        for piece in &pieces {
            segmenter.push(piece, &mut out);
        }
        segmenter.finish(&mut out);
    }
}
