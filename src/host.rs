//! Hosts as operators write them: names, IPv4 and IPv6 addresses, with or without a port, by themselves and in URLs.
//!
//! # Why
//! What cannot be the name of a host is looked up like any other, and found out by the first call that fails for it. So
//! each key that holds a host is checked where it is read, with its line.

use std::net::{Ipv4Addr, Ipv6Addr};

use reqwest::Url;
use serde::{Deserialize, Deserializer, de::Error as _};

/// Longest name, and longest part of one between dots, octets (RFC 1035 section 2.3.4).
const LONGEST: (usize, usize) = (253, 63);

/// Host and port of `text`: a name, an IPv4 address or an IPv6 address, the latter in brackets where a port follows
/// (RFC 3986 section 3.2.2). Names may end in a dot and have underscores, which containers' names do.
///
/// # Errors
/// It is none; what is wrong with it.
pub fn split(text: &str) -> Result<(&str, Option<u16>), String> {
    read(text).map_err(|why| {
        format!(
            "`{text}` is no host: {why}; write a name or an address, such as sip.example.com, 192.0.2.7:5060 or [2001:db8::7]:5060"
        )
    })
}

fn read(text: &str) -> Result<(&str, Option<u16>), String> {
    if text.parse::<Ipv6Addr>().is_ok() {
        return Ok((text, None));
    }
    if let Some((scheme, _)) = text.split_once("://") {
        return Err(format!("`{scheme}://` is of a URL"));
    }
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (inside, tail) = rest.split_once(']').ok_or("its bracket is not closed")?;
            if inside.parse::<Ipv6Addr>().is_err() {
                return Err(format!("`{inside}` is no IPv6 address"));
            }
            let port = tail.strip_prefix(':');
            if port.is_none() && !tail.is_empty() {
                return Err(format!("`{tail}` follows its bracket"));
            }
            (&text[..inside.len() + 2], port)
        }
        None => match text.split_once(':') {
            Some((_, rest)) if rest.contains(':') => return Err("it has several colons and is no IPv6 address".into()),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if !host.starts_with('[') {
        name(host)?;
    }
    let port = port.map(|port| {
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let number = port.parse().ok().filter(|port: &u16| digits && *port != 0);
        number.ok_or_else(|| format!("`{port}` is no port, 1 to 65535"))
    });
    Ok((host, port.transpose()?))
}

/// Whether `text` is a name or an IPv4 address.
fn name(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("there is no name".into());
    }
    if let Some(c) = text.chars().find(|c| !(c.is_ascii_alphanumeric() || "-._".contains(*c))) {
        return Err(match c {
            c if c.is_whitespace() => "it has a space".into(),
            c if !c.is_ascii() => format!("`{c}` is no ASCII; write the name as DNS has it (xn--...)"),
            c => format!("`{}` cannot be in a name", c.escape_default()),
        });
    }
    let whole = text.strip_suffix('.').unwrap_or(text);
    if whole.len() > LONGEST.0 {
        return Err(format!("a name has at most {} characters", LONGEST.0));
    }
    for label in whole.split('.') {
        match label.len() {
            0 => return Err("nothing stands between two dots or before the first".into()),
            long if long > LONGEST.1 => return Err(format!("`{label}` is longer than {} characters", LONGEST.1)),
            _ if label.starts_with('-') || label.ends_with('-') => {
                return Err(format!("`{label}` begins or ends with `-`"));
            }
            _ => {}
        }
    }
    // No top-level domain is a number (RFC 3696 section 2): it is an address with a slip of the pen.
    let last = whole.rsplit('.').next().unwrap_or_default();
    if last.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<Ipv4Addr>().is_err() {
        return Err("it ends in a number and is no IPv4 address".into());
    }
    Ok(())
}

/// The same text for serde, of the key `host`: an IPv6 address in brackets, also where it was written without.
pub fn with_port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    split(&text).map_err(|error| D::Error::custom(format!("host: {error}")))?;
    Ok(if text.parse::<Ipv6Addr>().is_ok() { format!("[{text}]") } else { text })
}

/// `text` as a URL of one of `schemes`, with a host that can be one.
///
/// # Errors
/// It is none; what was expected.
pub fn url(text: &str, schemes: &[&str]) -> Result<Url, String> {
    let expected = || schemes.iter().map(|scheme| format!("{scheme}://...")).collect::<Vec<_>>().join(" or ");
    // The parser would leave it out, and others that see the text would not.
    if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(format!("`{text}` has a space in it: expected {}", expected()));
    }
    let url = Url::parse(text).map_err(|error| format!("`{text}`: {error}: expected {}", expected()))?;
    if !schemes.contains(&url.scheme()) {
        return Err(format!("`{text}`: expected {}", expected()));
    }
    of(&url)?;
    Ok(url)
}

/// Whether the host of `url` can be one.
///
/// # Errors
/// It cannot; the text has no more of the URL than that.
pub fn of(url: &Url) -> Result<(), String> {
    split(url.host_str().unwrap_or_default()).map(|_| ())
}

/// As [`split`], for text within a URL, where an IPv6 address always stands in brackets.
///
/// # Errors
/// It is none; what is wrong with it.
pub fn in_url(text: &str) -> Result<(), String> {
    match text.parse::<Ipv6Addr>() {
        Ok(_) => Err(format!("an IPv6 address stands in brackets there: [{text}]")),
        Err(_) => split(text).map(|_| ()),
    }
}

/// Whether each of `origins` is `*` or the origin of a page (RFC 6454 section 6.2): `http://` or `https://`, host and perhaps
/// port.
///
/// # Errors
/// The first that is none.
pub fn pages(origins: &[String]) -> Result<(), String> {
    for text in origins.iter().filter(|text| *text != "*") {
        let wrong = |why: &str| format!("`{text}` is no origin{why}; write it like https://app.example.com, or \"*\"");
        let parts = text.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https"));
        let (_, host) = parts.ok_or_else(|| wrong(""))?;
        in_url(host).map_err(|why| wrong(&format!(": {why}")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_and_addresses_with_and_without_a_port() {
        for (text, host, port) in [
            ("sip.example.com", "sip.example.com", None),
            ("sip.example.com.", "sip.example.com.", None),
            ("sip.example.com.:5061", "sip.example.com.", Some(5061)),
            ("localhost:5060", "localhost", Some(5060)),
            ("my_pbx", "my_pbx", None),
            ("3com.example", "3com.example", None),
            ("xn--mnchen-3ya.example", "xn--mnchen-3ya.example", None),
            ("192.0.2.7", "192.0.2.7", None),
            ("192.0.2.7:65535", "192.0.2.7", Some(65535)),
            ("2001:db8::7", "2001:db8::7", None),
            ("::1", "::1", None),
            ("[2001:db8::7]", "[2001:db8::7]", None),
            ("[::ffff:192.0.2.7]:5060", "[::ffff:192.0.2.7]", Some(5060)),
        ] {
            assert_eq!(split(text), Ok((host, port)), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_a_host_is_refused_with_the_reason() {
        let long = format!("{}.example", "a".repeat(64));
        let longer = ["a"; 128].join(".");
        for (text, why) in [
            ("", "no name"),
            ("not a host", "a space"),
            (" sip.example.com", "a space"),
            ("sip.example.com/x", "`/` cannot be"),
            ("user@sip.example.com", "`@` cannot be"),
            ("sip.example.com;transport=tcp", "`;` cannot be"),
            ("sip..example.com", "between two dots"),
            (".example.com", "between two dots"),
            (".", "between two dots"),
            ("-a.example.com", "begins or ends"),
            ("a-.example.com", "begins or ends"),
            (&long, "longer than 63"),
            (&longer, "at most 253"),
            ("münchen.example", "xn--"),
            ("https://sip.example.com", "of a URL"),
            ("sip:sip.example.com", "no port"),
            ("sip.example.com:", "no port"),
            ("sip.example.com:0", "no port"),
            ("sip.example.com:65536", "no port"),
            ("sip.example.com:+5060", "no port"),
            (":5060", "no name"),
            ("192.0.2", "no IPv4"),
            ("192.0.2.300", "no IPv4"),
            ("192.0.2.7.", "no IPv4"),
            ("[192.0.2.7]", "no IPv6"),
            ("[2001:db8::7", "not closed"),
            ("[2001:db8::7]5060", "follows its bracket"),
            ("[2001:db8::7]:x", "no port"),
            ("2001:db8::g", "several colons"),
        ] {
            let error = split(text).expect_err(text);
            assert!(error.contains(why) && error.starts_with(&format!("`{text}`")), "{text}: {error}");
        }
    }

    #[test]
    fn an_ipv6_address_without_brackets_is_not_taken_for_a_host_and_a_port() {
        #[derive(Deserialize)]
        struct Holds {
            #[serde(deserialize_with = "with_port")]
            host: String,
        }
        let read = |host: &str| toml::from_str::<Holds>(&format!("host = \"{host}\"")).map(|holds| holds.host);
        assert_eq!(read("2001:db8::5060").as_deref(), Ok("[2001:db8::5060]"));
        assert_eq!(read("[2001:db8::7]:5060").as_deref(), Ok("[2001:db8::7]:5060"));
        assert!(read("a b").expect_err("no host").message().starts_with("host: `a b`"));
    }

    #[test]
    fn urls_have_a_scheme_that_is_expected_and_a_host() {
        let read = |text: &str| url(text, &["ws", "wss"]);
        for good in ["ws://a", "wss://agent.example.com:8443/relay?x={y}", "ws://[::1]:7/", "ws://127.0.0.1:0"] {
            assert!(read(good).is_ok(), "{good}: {:?}", read(good));
        }
        for wrong in
            ["", "a", "http://a", "ws://", "ws://a b", " ws://a", "ws://a..b", "ws://a:65536", "ws://1.2.3.400"]
        {
            let error = read(wrong).expect_err(wrong);
            assert!(error.contains(&format!("`{wrong}`")) || error.contains("is no host"), "{wrong}: {error}");
        }
    }

    #[test]
    fn origins_are_a_scheme_and_a_host() {
        let read = |text: &str| pages(&["*".to_owned(), text.to_owned()]);
        for good in ["https://app.example.com", "http://localhost:3000", "https://[::1]:8443"] {
            assert_eq!(read(good), Ok(()), "{good}");
        }
        let wrong = ["app.example.com", "https://", "https://a/", "https://a b", "ws://a", "https://*.a", "http://::1"];
        for wrong in wrong {
            assert!(read(wrong).expect_err(wrong).contains("no origin"), "{wrong}");
        }
    }
}
