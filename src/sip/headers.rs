//! Headers of a call out that are not SIP's own business: those of the application, and who calls. `outbound.rs` places
//! calls with them, `explain.rs` tells of them without a call: both need a new one.

use std::collections::BTreeMap;

use rsipstack::sip::{Header, Uri};

use super::{DialError, body, config::TrunkConfig, timer};

/// Headers that an application may not set: the stack does, or the meaning of the call hangs on them.
const RESERVED: [&str; 24] = [
    "via",
    "v",
    "from",
    "f",
    "to",
    "t",
    "call-id",
    "i",
    "cseq",
    "contact",
    "m",
    "max-forwards",
    "content-length",
    "l",
    "content-type",
    "c",
    "route",
    "record-route",
    "require",
    "proxy-require",
    "supported",
    "k",
    "authorization",
    "proxy-authorization",
];

/// P-Asserted-Identity, where the trunk wants it and the application has set none.
pub(super) fn asserted(
    trunk: Option<&TrunkConfig>,
    caller: &Uri,
    headers: &BTreeMap<String, String>,
) -> Option<Header> {
    const NAME: &str = "P-Asserted-Identity";
    let wanted = trunk.is_some_and(|trunk| trunk.assert_identity);
    let set = headers.keys().any(|name| name.eq_ignore_ascii_case(NAME));
    (wanted && !set).then(|| Header::Other(NAME.to_owned(), format!("<{caller}>")))
}

/// What every INVITE of ours says, and what the application adds.
///
/// # Errors
/// A header that it may not set, or a value that cannot be sent.
pub(super) fn extra_headers(headers: &BTreeMap<String, String>) -> Result<Vec<Header>, DialError> {
    let mut extra = vec![body::allow(), timer::supported()];
    for (name, value) in headers {
        let token = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.!%*_+`'~".contains(&b));
        if !token || RESERVED.contains(&name.to_ascii_lowercase().as_str()) {
            return Err(DialError::Address(format!("the header `{name}` cannot be set")));
        }
        if value.chars().any(char::is_control) || value.len() > 1_024 {
            return Err(DialError::Address(format!(
                "the value of header `{name}` is too long or has control characters"
            )));
        }
        extra.push(Header::Other(name.clone(), value.clone()));
    }
    Ok(extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_and_unsafe_headers_are_refused() {
        let one = |name: &str, value: &str| extra_headers(&BTreeMap::from([(name.to_owned(), value.to_owned())]));
        assert!(one("X-Account", "7").is_ok());
        assert!(one("Via", "x").is_err());
        assert!(one("X-Bad", "a\r\nVia: b").is_err());
        assert!(one("X Bad", "a").is_err());
        assert!(one("", "a").is_err());
    }
}
