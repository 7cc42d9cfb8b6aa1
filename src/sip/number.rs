//! Telephone numbers as a trunk writes them: to E.164 and back (ITU-T E.164, E.123; RFC 3966).
//!
//! Pure text. What people and programs write (`+49 30 1234`, `0049301234`, `0301234`) becomes one form, which prefixes are
//! compared with; what leaves is written as the trunk wants it.
//!
//! # Why
//! *Prefixes are compared after that.* `00881...` is the satellite network that `+881...` is: a plan that allows `0` and
//! does not know this pays for it.

use serde::{Deserialize, Deserializer, de::Error as _};

/// `[[sip.trunk]] numbers`: how numbers are read and written there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numbers {
    /// Country code of numbers without one: digits.
    #[serde(deserialize_with = "country")]
    pub country: String,
    /// What begins an international number, where it is not `+`.
    #[serde(default = "international", deserialize_with = "digits")]
    pub international: String,
    /// What begins a number of this country that has no country code; empty: seven digits and more are such numbers.
    #[serde(default = "national", deserialize_with = "digits")]
    pub national: String,
    /// How numbers are sent.
    #[serde(default)]
    pub send: Format,
    /// Applied to what is sent, the first that fits.
    #[serde(default)]
    pub rules: Vec<Rule>,
}

/// How a number is written.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `+4930123`
    #[default]
    Plus,
    /// `4930123`
    Digits,
    /// `004930123`
    International,
    /// `030123` in this country, else as `international`.
    National,
}

/// `{ prefix = "+49800", replace = "0800" }`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// What the number, as it would be sent, begins with.
    pub prefix: String,
    /// What stands there instead.
    pub replace: String,
}

fn international() -> String {
    "00".to_owned()
}

fn national() -> String {
    "0".to_owned()
}

fn digits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.bytes().all(|byte| byte.is_ascii_digit()) && text.len() <= 4 {
        true => Ok(text),
        false => Err(D::Error::custom(format!("`{text}`: expected up to four digits, such as \"00\" or \"0\""))),
    }
}

fn country<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = digits(deserializer)?;
    // E.164: one to three digits, none of which is a leading zero.
    match (1..=3).contains(&text.len()) && !text.starts_with('0') {
        true => Ok(text),
        false => Err(D::Error::custom(format!("`{text}` is no country code, such as \"49\""))),
    }
}

/// Longest number of E.164, without `+`.
const LONGEST: usize = 15;
/// Shortest number that counts as a national one where no prefix marks those.
const SUBSCRIBER: usize = 7;

impl Numbers {
    /// `user` as `+` and digits; what is no such number (a name, a short code, a service) as it is.
    pub(super) fn e164(&self, user: &str) -> String {
        let bare: String = user.chars().filter(|c| !"-.()".contains(*c)).collect();
        let number = |digits: &str| {
            let sound = !digits.is_empty() && digits.len() <= LONGEST && digits.bytes().all(|b| b.is_ascii_digit());
            // No country code begins with 0.
            (sound && !digits.starts_with('0')).then(|| format!("+{digits}"))
        };
        let at_home = |digits: &str| number(&format!("{}{digits}", self.country));
        let found = if let Some(rest) = bare.strip_prefix('+') {
            number(rest)
        } else if !bare.bytes().all(|byte| byte.is_ascii_digit()) {
            None
        } else if let Some(rest) = bare.strip_prefix(&self.international).filter(|_| !self.international.is_empty()) {
            number(rest)
        } else if self.national.is_empty() {
            if bare.len() >= SUBSCRIBER { at_home(&bare) } else { None }
        } else {
            // A second national prefix is a mistake, and not a number.
            let rest = bare.strip_prefix(&self.national).filter(|rest| rest.len() >= 2 && !rest.starts_with('0'));
            rest.and_then(at_home)
        };
        found.unwrap_or_else(|| user.to_owned())
    }

    /// What is sent for `number`, which [`Numbers::e164`] has made.
    pub(super) fn written(&self, number: &str) -> String {
        let text = match number.strip_prefix('+') {
            None => number.to_owned(),
            Some(digits) => match self.send {
                Format::Plus => number.to_owned(),
                Format::Digits => digits.to_owned(),
                Format::International => format!("{}{digits}", self.international),
                Format::National => match digits.strip_prefix(&self.country) {
                    Some(rest) => format!("{}{rest}", self.national),
                    None => format!("{}{digits}", self.international),
                },
            },
        };
        let rule = self.rules.iter().find_map(|rule| Some((rule, text.strip_prefix(&rule.prefix)?)));
        rule.map(|(rule, rest)| format!("{}{rest}", rule.replace)).unwrap_or(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(text: &str) -> Numbers {
        toml::from_str(text).expect("valid")
    }

    #[test]
    fn every_way_to_write_a_number_is_one_number() {
        let germany = numbers("country = \"49\"");
        for (written, number) in [
            ("+49-30-1234", "+49301234"),
            ("0049301234", "+49301234"),
            ("0301234", "+49301234"),
            ("(030)12.34", "+49301234"),
            ("008811234", "+8811234"),
            // No numbers of the public network.
            ("110", "110"),
            ("alice", "alice"),
            ("*21#", "*21#"),
            ("00", "00"),
            ("0000491", "0000491"),
            ("+0301234", "+0301234"),
            ("+1234567890123456", "+1234567890123456"),
        ] {
            assert_eq!(germany.e164(written), number, "{written}");
        }
        let america = numbers("country = \"1\"\ninternational = \"011\"\nnational = \"1\"");
        assert_eq!(america.e164("15551234567"), "+15551234567");
        assert_eq!(america.e164("01149301234"), "+49301234");
        let italy = numbers("country = \"39\"\nnational = \"\"");
        assert_eq!((italy.e164("3331234567"), italy.e164("112")), ("+393331234567".to_owned(), "112".to_owned()));
    }

    #[test]
    fn a_number_is_written_as_the_trunk_wants_it() {
        for (send, at_home, abroad) in [
            ("plus", "+49301234", "+3312345"),
            ("digits", "49301234", "3312345"),
            ("international", "0049301234", "003312345"),
            ("national", "0301234", "003312345"),
        ] {
            let numbers = numbers(&format!("country = \"49\"\nsend = \"{send}\""));
            assert_eq!(numbers.written("+49301234"), at_home);
            assert_eq!(numbers.written("+3312345"), abroad);
            assert_eq!(numbers.written("alice"), "alice");
            // What is sent is read as the number that it was.
            if send != "digits" {
                assert_eq!(numbers.e164(&numbers.written("+3312345")), "+3312345");
            }
        }
        let ruled = numbers(
            "country = \"49\"\nrules = [{ prefix = \"+49800\", replace = \"0800\" }, { prefix = \"+\", replace = \"9*\" }]",
        );
        assert_eq!((ruled.written("+498001"), ruled.written("+3312345")), ("08001".to_owned(), "9*3312345".to_owned()));
    }

    #[test]
    fn what_is_no_code_is_refused() {
        for text in ["country = \"049\"", "country = \"+49\"", "country = \"\"", "country = \"49\"\nnational = \"x\""] {
            assert!(toml::from_str::<Numbers>(text).is_err(), "{text}");
        }
    }
}
