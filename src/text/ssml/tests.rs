use proptest::prelude::*;

use super::*;

/// Everything that is read of `text`, handed over in pieces of `size` characters.
fn events(text: &str, size: usize) -> (Vec<Event>, Inlines) {
    let mut ssml = Ssml::default();
    let mut out = Vec::new();
    let chars: Vec<char> = text.chars().collect();
    for piece in chars.chunks(size.max(1)) {
        ssml.push(&piece.iter().collect::<String>(), &mut out);
    }
    ssml.finish(&mut out);
    (out, ssml.inlines)
}

fn mistakes(text: &str) -> Vec<String> {
    let (events, _) = events(text, usize::MAX);
    events.into_iter().filter_map(|event| if let Event::Mistake(what) = event { Some(what) } else { None }).collect()
}

#[test]
fn elements_become_events_however_the_text_is_split() {
    let text = "<speak xml:lang=\"en\">Hi <break time='0.5s'/><prosody rate=\"slow\" volume='+6dB'>there &lt;3 \
                <sub alias=\"Doctor\">Dr</sub> AT&T</prosody><mark name=\"a>b\"/> a < b<!-- no > --> \
                <emphasis>now</emphasis></speak>";
    let (whole, mut inlines) = events(text, usize::MAX);
    let Event::Text(inner) = &whole[4] else { panic!("{whole:?}") };
    let (written, given) = inlines.expand(inner);
    assert_eq!(written, "there <3 Dr AT&T");
    assert_eq!(given, [Given { at: 9..11, say: Say::Words("Doctor".into()) }]);
    assert_eq!(whole[1], Event::Text("Hi ".into()));
    assert_eq!(whole[2], Event::Break(Duration::from_millis(500)));
    let Event::Manner(manner) = &whole[3] else { panic!("{whole:?}") };
    assert_eq!((manner.language.as_deref(), manner.rate), (Some("en"), 0.75));
    assert!((manner.gain - 1.995).abs() < 0.01);
    assert_eq!(whole[5], Event::Manner(Manner { language: Some("en".into()), ..Manner::default() }));
    let Event::Text(last) = &whole[6] else { panic!("{whole:?}") };
    let (written, given) = inlines.expand(last);
    assert_eq!(written, " a < b now");
    let say: Vec<Say> = given.into_iter().map(|given| given.say).collect();
    assert_eq!(say, [Say::Mark("a>b".into()), Say::Tag("<strong>"), Say::Tag("</strong>")]);
    assert_eq!(whole[7], Event::Manner(Manner::default()));
    let merged = |events: Vec<Event>| {
        let mut merged: Vec<Event> = Vec::new();
        for event in events {
            match event {
                Event::Text(text) => push_text(&text, &mut merged),
                event => merged.push(event),
            }
        }
        merged
    };
    for size in 1..40 {
        assert_eq!(merged(events(text, size).0), whole, "pieces of {size}");
    }
}

#[test]
fn a_mistake_says_what_to_change_and_costs_its_own_tag() {
    for (text, expected) in [
        ("<break time=\"5 apples\"/>", "expected 500ms or 1.5s"),
        ("<break time=\"1h\"/>", "at most 10s"),
        ("<prosody rate='warp'>x</prosody>", "x-slow"),
        ("<prosody volume='+90dB'>x</prosody>", "+12dB"),
        ("<prosody pitch='high'>x</prosody>", "`pitch` has no effect"),
        ("<say-as interpret-as='money'>5</say-as>", "expected cardinal"),
        ("<say-as>5</say-as>", "needs the attribute `interpret-as`"),
        ("<phoneme ph='ʘ'>x</phoneme>", "x-espeak"),
        ("<phoneme alphabet='x-espeak' ph='a]]'>x</phoneme>", "without brackets"),
        ("<phoneme alphabet='pinyin' ph='chongqing'>重庆</phoneme>", "no syllable of Mandarin"),
        ("<phoneme alphabet='jyutping' ph='cung4'>重</phoneme>", "expected ipa, pinyin"),
        ("<voice name='bob'>x</voice>", "not among speak"),
        ("<lang>x</lang>", "xml:lang"),
        ("<mark/>", "`name`"),
        ("<sub alias=Doctor>x</sub>", "in quotes"),
        ("<s>x", "never closed: end it with `</s>`"),
        ("x</s>", "without a beginning"),
        ("<s><p>x</s></p>", "end inside one another"),
        ("<sub alias='a'><break/>x</sub>", "only text"),
        ("<break", "never closed by `>`"),
    ] {
        let told = mistakes(&format!("{text} and on"));
        assert!(told.iter().any(|what| what.contains(expected)), "{text}: {told:?}");
    }
    let (events, _) = events("one <break time='x'/>two <nonsense>three</nonsense>", usize::MAX);
    let said: String = events
        .iter()
        .filter_map(|event| if let Event::Text(text) = event { Some(text.as_str()) } else { None })
        .collect();
    assert_eq!(said, "one two three");
}

#[test]
fn no_sign_is_markup_in_a_section_of_characters() {
    for size in 1..20 {
        let (events, _) = events("a <![CDATA[<b> &amp; ]] x[0]]>1]]> <s>c</s><![CDATA[d]", size);
        let (mut said, mut mistakes) = (String::new(), Vec::new());
        for event in events {
            match event {
                Event::Text(text) => said.push_str(&text),
                Event::Mistake(what) => mistakes.push(what),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(said, "a <b> &amp; ]] x[01]]> \n\nc\n\nd]", "in pieces of {size}");
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert!(mistakes[0].contains("never closed by `]]>`"), "{mistakes:?}");
    }
}

#[test]
fn what_is_endless_is_bounded() {
    let mut ssml = Ssml::default();
    let mut out = Vec::new();
    for piece in ["<a ", "<!--", "<![CDATA[", "<sub alias='x'>", "<p>", "&", "<b \""] {
        for _ in 0..20_000 {
            ssml.push(piece, &mut out);
            out.clear();
        }
        ssml.push(&"x".repeat(100_000), &mut out);
        out.clear();
        assert!(ssml.buffer.len() <= LONGEST_TAG + 4, "{piece}");
        assert!(ssml.open.len() <= DEEPEST && ssml.capture.as_ref().is_none_or(|c| c.text.len() <= LONGEST_INLINE));
        ssml = Ssml::default();
    }
}

proptest! {
    #[test]
    fn anything_is_read_without_a_panic_and_no_private_character_is_forged(
        text in "(<[/a-z!-]{0,6}[ =\"'a-z0-9]{0,12}>|[&;#x0-9a-z<>\u{f0100}\u{f8001} ]|\\PC){0,40}",
        size in 1usize..9,
    ) {
        let (events, inlines) = events(&text, size);
        for event in events {
            if let Event::Text(text) = event {
                for c in text.chars().filter(|c| is_inline(*c)) {
                    prop_assert!(inlines.known.contains_key(&c));
                }
            }
        }
    }
}

#[test]
fn elements_that_are_nested_too_deep_end_none_around_them() {
    let text = format!("{}deep{} still", "<prosody rate=\"fast\">".repeat(40), "</prosody>".repeat(9));
    let (mut ssml, mut out) = (Ssml::default(), Vec::new());
    ssml.push(&text, &mut out);
    assert_eq!(
        (ssml.open.len(), ssml.deeper),
        (DEEPEST - 1, 0),
        "eight of them count for nothing, and so do their ends"
    );
    let told = out.iter().filter(|event| matches!(event, Event::Mistake(_))).count();
    assert_eq!(told, 8);
    // However many there are.
    ssml.push(&"<p>".repeat(100_000), &mut out);
    assert_eq!(ssml.open.len(), DEEPEST);
}
