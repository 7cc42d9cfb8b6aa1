//! What a model may call: descriptions for the request, the check of arguments, and what becomes of a call.

use std::collections::BTreeMap;
use std::sync::Arc;

use reqwest::Url;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::ToolCall;
use super::config::{Builtin, Llm, Tool};
use super::web;
use crate::host;
use crate::reach;
use crate::secret::Secret;

/// An HTTP request that a model may make. Its destination is fixed here: arguments fill the path and the query, never
/// the host.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpTool {
    /// What the model calls it: letters, digits, `_`, `-`.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// Where; `{argument}` in path or query stands for an argument.
    pub url: String,
    /// `GET`, `POST`, `PUT`, `PATCH` or `DELETE`.
    #[serde(default)]
    pub method: Method,
    /// Headers of the request.
    #[serde(default)]
    pub headers: BTreeMap<String, Secret>,
    /// JSON schema of the arguments. What is not in the URL goes into the query (GET, DELETE) or a JSON body.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
    /// Longest time for the whole request.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// What is longer is cut for the model.
    #[serde(default = "default_max_bytes")]
    pub max_bytes: usize,
    /// Whether it may lead to loopback, private and link-local addresses.
    #[serde(default)]
    pub allow_private: bool,
    /// Spoken while it takes long, in place of the agent's `filler`.
    pub filler: Option<String>,
}

/// Methods of HTTP tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Method {
    /// Arguments in the query.
    #[default]
    Get,
    /// Arguments in the body.
    Post,
    /// Arguments in the body.
    Put,
    /// Arguments in the body.
    Patch,
    /// Arguments in the query.
    Delete,
}

fn no_parameters() -> Value {
    json!({ "type": "object", "properties": {} })
}
fn default_timeout_ms() -> u64 {
    5_000
}
fn default_max_bytes() -> usize {
    8 << 10
}

/// What a call of a tool asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Hand the caller over.
    Transfer(String),
    /// End the call when everything was said.
    HangUp,
    /// Press keys.
    Digits(String),
    /// Make a request.
    Http {
        /// By which tool.
        tool: Arc<HttpTool>,
        /// With what.
        arguments: Map<String, Value>,
    },
}

/// Checks an HTTP tool of the configuration.
///
/// # Errors
/// What to change.
pub fn validate(tool: &HttpTool) -> Result<(), String> {
    let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if tool.name.is_empty() || tool.name.len() > 64 || !tool.name.chars().all(named) {
        return Err("name: expected 1 to 64 letters, digits, `_` or `-`".into());
    }
    if [Builtin::Transfer, Builtin::HangUp, Builtin::SendDigits].iter().any(|builtin| builtin.name() == tool.name) {
        return Err("this is the name of a built-in tool".into());
    }
    if tool.parameters["type"] != "object" || !tool.parameters["properties"].is_object() {
        return Err("parameters: expected a JSON schema { type = \"object\", properties = { ... } }".into());
    }
    if tool.timeout_ms == 0 || tool.max_bytes == 0 {
        return Err("timeout_ms and max_bytes: expected 1 or more".into());
    }
    for (name, value) in &tool.headers {
        web::header(name, value)?;
    }
    let names = placeholders(&tool.url)?;
    for name in &names {
        if tool.parameters["properties"].get(name).is_none() {
            return Err(format!("url has {{{name}}}, which parameters.properties does not describe"));
        }
    }
    // The same host whatever is filled in: braces are no character of a host name.
    let host = tool.url.split_once("://").map_or("", |(_, rest)| rest.split(['/', '?', '#']).next().unwrap_or(""));
    if host.contains(['{', '}', '@']) {
        return Err("url: arguments may stand in the path and the query, not in the host".into());
    }
    let url = fill(&tool.url, &names.iter().map(|name| (name.clone(), json!("x"))).collect())?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("url `{}`: expected http://... or https://...", tool.url));
    }
    host::of(&url).map_err(|error| format!("url `{}`: {error}", tool.url))?;
    match reach::private_literal(&url) {
        Some(ip) if !tool.allow_private => {
            Err(format!("url leads to {ip}, a private address: set allow_private = true if that is meant"))
        }
        _ => Ok(()),
    }
}

/// `tools` of a request.
pub fn describe(llm: &Llm) -> Vec<Value> {
    let function = |name: &str, description: &str, parameters: &Value| {
        json!({ "type": "function",
                "function": { "name": name, "description": description, "parameters": parameters } })
    };
    let tools = llm.tools.iter().map(|tool| match tool {
        Tool::Http(http) => function(&http.name, &http.description, &http.parameters),
        Tool::Builtin(builtin) => {
            let description = match builtin {
                Builtin::Transfer => "Hand the caller over to somebody else. Say so before.",
                Builtin::HangUp => "End the call when everything has been said. Say goodbye in the same answer.",
                Builtin::SendDigits => "Press telephone keys, for menus of others.",
            };
            function(builtin.name(), description, &parameters(*builtin, llm))
        }
    });
    tools.collect()
}

fn parameters(builtin: Builtin, llm: &Llm) -> Value {
    match builtin {
        Builtin::Transfer => {
            let names: Vec<&String> = llm.transfer_to.keys().collect();
            json!({ "type": "object", "properties": { "to": { "type": "string", "enum": names } }, "required": ["to"] })
        }
        Builtin::HangUp => no_parameters(),
        Builtin::SendDigits => {
            let digits =
                json!({ "type": "string", "maxLength": 64, "description": "0-9, *, #, A-D; w waits half a second" });
            json!({ "type": "object", "properties": { "digits": digits }, "required": ["digits"] })
        }
    }
}

/// What `call` asks for.
///
/// # Errors
/// There is no such tool or its arguments do not fit; the text is for the model, which may do better.
pub fn order(llm: &Llm, call: &ToolCall) -> Result<Order, String> {
    let named = |tool: &&Tool| match tool {
        Tool::Builtin(builtin) => builtin.name() == call.name,
        Tool::Http(http) => http.name == call.name,
    };
    let tool = llm.tools.iter().find(named).ok_or_else(|| format!("there is no tool `{}`", call.name))?;
    let text = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
    let arguments: Value = serde_json::from_str(text).map_err(|error| format!("the arguments are no JSON: {error}"))?;
    let schema = match tool {
        Tool::Builtin(builtin) => parameters(*builtin, llm),
        Tool::Http(http) => http.parameters.clone(),
    };
    check(&schema, &arguments, "arguments")?;
    let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
    match tool {
        Tool::Builtin(Builtin::HangUp) => Ok(Order::HangUp),
        Tool::Builtin(Builtin::SendDigits) => Ok(Order::Digits(text("digits"))),
        Tool::Builtin(Builtin::Transfer) => {
            let to = llm.transfer_to.get(&text("to")).ok_or("there is no such destination")?;
            Ok(Order::Transfer(to.clone()))
        }
        Tool::Http(http) => {
            let Value::Object(arguments) = arguments else { return Err("the arguments are no object".into()) };
            Ok(Order::Http { tool: Arc::new((**http).clone()), arguments })
        }
    }
}

/// `value` against the part of JSON schema that tools use: `type`, `enum`, `required`, `properties`,
/// `additionalProperties: false`, `items`, `minimum`, `maximum`, `maxLength`. Other keywords are for the model.
fn check(schema: &Value, value: &Value, place: &str) -> Result<(), String> {
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => true,
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if !kinds.is_empty() && !kinds.iter().any(|kind| is(kind)) {
        return Err(format!("{place} must be of type {}", kinds.join(" or ")));
    }
    if let Some(words) = schema["enum"].as_array().filter(|words| !words.contains(value)) {
        return Err(format!("{place} must be one of {}", Value::from(words.clone())));
    }
    if let Some(number) = value.as_f64() {
        let (least, most) = (schema["minimum"].as_f64(), schema["maximum"].as_f64());
        if least.is_some_and(|least| number < least) || most.is_some_and(|most| number > most) {
            return Err(format!("{place} is outside its limits"));
        }
    }
    if let (Some(text), Some(most)) = (value.as_str(), schema["maxLength"].as_u64())
        && text.chars().count() as u64 > most
    {
        return Err(format!("{place} is longer than {most} characters"));
    }
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        check(&schema["items"], item, &format!("{place}[{index}]"))?;
    }
    if let Some(object) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !object.contains_key(name) {
                return Err(format!("{place}.{name} is missing"));
            }
        }
        for (name, inner) in object {
            match schema["properties"].get(name) {
                Some(described) => check(described, inner, &format!("{place}.{name}"))?,
                None if schema["additionalProperties"] == false => return Err(format!("{place}.{name} is not known")),
                None => {}
            }
        }
    }
    Ok(())
}

/// Names in braces.
fn placeholders(template: &str) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    let mut rest = template;
    while let Some(at) = rest.find(['{', '}']) {
        let inner = rest[at..].strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let Some((name, after)) = inner.filter(|(name, _)| !name.is_empty() && !name.contains('{')) else {
            return Err(format!("url `{template}`: braces that do not pair"));
        };
        names.push(name.to_owned());
        rest = after;
    }
    Ok(names)
}

/// The URL with arguments in place of their names, escaped so that they stay where they are put (RFC 3986 section 2.3).
///
/// # Errors
/// An argument is missing, has no text, or the result is no URL.
pub(super) fn fill(template: &str, arguments: &Map<String, Value>) -> Result<Url, String> {
    let mut text = template.to_owned();
    for name in placeholders(template)? {
        let value = match arguments.get(&name) {
            Some(Value::String(value)) => value.clone(),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
            _ => return Err(format!("`{name}` is needed for the address")),
        };
        // A segment of dots would climb in the path.
        if value.is_empty() || value.chars().all(|c| c == '.') {
            return Err(format!("`{name}` cannot be `{value}`"));
        }
        let escaped = value.bytes().fold(String::new(), |mut out, byte| {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
                _ => out.push_str(&format!("%{byte:02X}")),
            }
            out
        });
        text = text.replacen(&format!("{{{name}}}"), &escaped, 1);
    }
    Url::parse(&text).map_err(|error| format!("url `{template}`: {error}"))
}

/// The request of an HTTP tool: its URL, and its JSON body where it has one.
///
/// # Errors
/// An argument that the address needs is missing.
pub(super) fn request(tool: &HttpTool, arguments: &Map<String, Value>) -> Result<(Url, Option<Value>), String> {
    let mut url = fill(&tool.url, arguments)?;
    let used = placeholders(&tool.url)?;
    let rest: Map<String, Value> =
        arguments.iter().filter(|(name, _)| !used.contains(name)).map(|(k, v)| (k.clone(), v.clone())).collect();
    match tool.method {
        Method::Get | Method::Delete => {
            for (name, value) in &rest {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                url.query_pairs_mut().append_pair(name, &value);
            }
            Ok((url, None))
        }
        Method::Post | Method::Put | Method::Patch => Ok((url, Some(Value::Object(rest)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(url: &str) -> HttpTool {
        serde_json::from_value(json!({
            "name": "track", "description": "Where a parcel is.", "url": url,
            "parameters": { "type": "object", "required": ["id"], "additionalProperties": false, "properties": {
                "id": { "type": "string", "maxLength": 20 },
                "days": { "type": "integer", "minimum": 1, "maximum": 9 },
                "kind": { "enum": ["parcel", "letter"] },
                "tags": { "type": "array", "items": { "type": "string" } },
            } },
        }))
        .expect("a tool")
    }

    fn llm() -> Llm {
        let mut llm = Llm::at("http://127.0.0.1:1/v1", "m");
        llm.tools = vec![
            Tool::Builtin(Builtin::Transfer),
            Tool::Builtin(Builtin::HangUp),
            Tool::Builtin(Builtin::SendDigits),
            Tool::Http(Box::new(tool("https://api.example.com/parcels/{id}"))),
        ];
        llm.transfer_to = BTreeMap::from([("desk".to_owned(), "sip:desk@pbx.example.com".to_owned())]);
        llm
    }

    fn asked(name: &str, arguments: &str) -> Result<Order, String> {
        order(&llm(), &ToolCall { id: "1".into(), name: name.into(), arguments: arguments.into() })
    }

    #[test]
    fn a_transfer_leads_only_where_the_configuration_says() {
        assert_eq!(asked("transfer", "{\"to\":\"desk\"}"), Ok(Order::Transfer("sip:desk@pbx.example.com".into())));
        for wrong in ["{\"to\":\"sip:premium@evil.example\"}", "{}", "[]", "nonsense", "{\"to\":7}"] {
            assert!(asked("transfer", wrong).is_err(), "{wrong}");
        }
        assert_eq!(asked("hang_up", ""), Ok(Order::HangUp));
        assert_eq!(asked("send_digits", "{\"digits\":\"12#\"}"), Ok(Order::Digits("12#".into())));
        assert!(asked("fly", "{}").expect_err("unknown").contains("no tool"));
    }

    #[test]
    fn arguments_are_checked_against_their_schema() {
        assert!(matches!(asked("track", "{\"id\":\"7\",\"days\":3}"), Ok(Order::Http { .. })));
        for (wrong, why) in [
            ("{}", "arguments.id is missing"),
            ("{\"id\":7}", "must be of type string"),
            ("{\"id\":\"7\",\"days\":0}", "limits"),
            ("{\"id\":\"7\",\"days\":1.5}", "integer"),
            ("{\"id\":\"7\",\"kind\":\"cow\"}", "one of"),
            ("{\"id\":\"7\",\"tags\":[1]}", "tags[0]"),
            ("{\"id\":\"7\",\"x\":1}", "not known"),
            ("{\"id\":\"123456789012345678901\"}", "longer"),
        ] {
            let error = asked("track", wrong).expect_err(wrong);
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }

    #[test]
    fn arguments_stay_in_the_place_that_the_address_gives_them() {
        let of = |id: &str| json!({ "id": id, "days": 2 }).as_object().cloned().expect("an object");
        let (url, body) = request(&tool("https://api.example.com/p/{id}?v=1"), &of("a/../b?x=1#y @h")).expect("a URL");
        assert_eq!(url.as_str(), "https://api.example.com/p/a%2F..%2Fb%3Fx%3D1%23y%20%40h?v=1&days=2");
        assert_eq!((url.host_str(), body), (Some("api.example.com"), None));
        assert!(request(&tool("https://api.example.com/p/{id}"), &of("..")).is_err());
        let post = HttpTool { method: Method::Post, ..tool("https://api.example.com/p/{id}") };
        assert_eq!(request(&post, &of("7")).expect("a URL").1, Some(json!({ "days": 2 })));
    }

    #[test]
    fn a_tool_that_could_lead_elsewhere_is_refused() {
        for (url, why) in [
            ("https://{id}.example.com/", "not in the host"),
            ("https://{id}/", "not in the host"),
            ("https://user@example.com/", "not in the host"),
            ("ftp://example.com/{id}", "http"),
            ("https://example.com/{other}", "does not describe"),
            ("https://example.com/{id", "braces"),
            ("http://127.0.0.1/{id}", "allow_private"),
            ("http://[::1]/{id}", "allow_private"),
            ("http://0x7f.1/{id}", "allow_private"),
            ("nothing", "url"),
        ] {
            let error = validate(&tool(url)).expect_err(url);
            assert!(error.contains(why), "{url}: {error}");
        }
        assert_eq!(validate(&tool("https://api.example.com/{id}?a=b")), Ok(()));
        assert_eq!(validate(&HttpTool { allow_private: true, ..tool("http://127.0.0.1/{id}") }), Ok(()));
        assert!(validate(&HttpTool { name: "hang_up".into(), ..tool("https://a.b/") }).is_err());
    }
}
