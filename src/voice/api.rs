//! What `/v1/audio/voices` does, without HTTP.
//!
//! Owns the answers of the three routes as plain data and the rule that one voice is enrolled at a time. The server
//! reads the multipart body into a [`Form`], calls [`Service::add`] where blocking is allowed, and turns a
//! [`Refusal`] into its error shape.
//!
//! # Why
//! One at a time: an enrolment keeps several cores busy for seconds, and the calls that are live meanwhile come
//! first. Who comes second is told when to come back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::decode::MAX_BYTES;
use super::enrol::{EnrolError, Enroller, MAX_CONSENT, MAX_TRANSCRIPT, Options, Request};
use super::quality::Quality;
use super::store::{Entry, OWNER, Store, StoreError, VoiceName};

/// How long a second enrolment is told to wait.
const BUSY: Duration = Duration::from_secs(10);

/// The fields of `POST /v1/audio/voices`.
#[derive(Clone, Debug, Default)]
pub struct Form {
    /// `audio_sample`: a recording, at most [`super::decode::MAX_BYTES`].
    pub audio_sample: Vec<u8>,
    /// `name`.
    pub name: String,
    /// `ref_text`: what is said in the recording.
    pub ref_text: String,
    /// `consent`.
    pub consent: Option<String>,
    /// `languages`: tags, comma-separated.
    pub languages: Option<String>,
    /// `replace`: whether a voice of that name gives way.
    pub replace: bool,
    /// Not a field: the tenant that it will belong to; `None`: the operator, whose form may replace any voice.
    pub owner: Option<String>,
}

/// The fields of a form, and how many bytes each may have.
const FIELDS: [(&str, usize); 6] = [
    ("audio_sample", MAX_BYTES),
    ("name", 1 << 10),
    ("ref_text", 4 * MAX_TRANSCRIPT),
    ("consent", 4 * MAX_CONSENT),
    ("languages", 1 << 10),
    ("replace", 16),
];

impl Form {
    /// The most bytes that a field may have, so that reading a body can stop; `None`: there is no such field.
    pub fn limit(field: &str) -> Option<usize> {
        FIELDS.iter().find(|(name, _)| *name == field).map(|(_, limit)| *limit)
    }

    /// Takes one field of a multipart body.
    ///
    /// # Errors
    /// There is no such field, it is too long, or it is not of its kind.
    pub fn set(&mut self, field: &str, value: Vec<u8>) -> Result<(), Refusal> {
        let Some((name, limit)) = FIELDS.into_iter().find(|(name, _)| *name == field) else {
            let known = FIELDS.map(|(name, _)| format!("`{name}`")).join(", ");
            let field: String = field.chars().take(40).collect();
            let message = format!("there is no field `{field}`; there are {known}");
            return Err(Refusal::new(400, "unknown_field", None, message));
        };
        if value.len() > limit {
            let message = format!("`{name}` has {} bytes, at most {limit} are taken", value.len());
            return Err(Refusal::new(413, "field_too_large", Some(name), message));
        }
        if name == "audio_sample" {
            self.audio_sample = value;
            return Ok(());
        }
        let text = String::from_utf8(value)
            .map_err(|_| Refusal::new(400, "invalid_field", Some(name), format!("`{name}` is not UTF-8 text")))?;
        match name {
            "name" => text.trim().clone_into(&mut self.name),
            "ref_text" => self.ref_text = text,
            "consent" => self.consent = Some(text),
            "languages" => self.languages = Some(text),
            _ => {
                self.replace = text.trim().parse().map_err(|_| {
                    let message = format!("`{name}` is true or false");
                    Refusal::new(400, "invalid_field", Some(name), message)
                })?;
            }
        }
        Ok(())
    }

    /// The required fields must be there.
    fn complete(&self) -> Result<(), Refusal> {
        let required = [
            ("audio_sample", self.audio_sample.is_empty(), "a recording of 3 to 30 s of speech"),
            ("name", self.name.is_empty(), "what the voice is called"),
        ];
        match required.into_iter().find(|(_, missing, _)| *missing) {
            Some((name, _, what)) => {
                Err(Refusal::new(400, "missing_field", Some(name), format!("the field `{name}` is missing: {what}")))
            }
            None => Ok(()),
        }
    }
}

/// The answer to a successful `POST`, status 201.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Added {
    /// The voice.
    pub voice: Entry,
    /// What to think of the recording.
    pub quality: Quality,
    /// Tokens before the first sound of an utterance.
    pub first_hop_tokens: usize,
}

/// The answer to `GET`.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Every enrolled voice, by name.
    pub voices: Vec<Entry>,
}

/// Why a request was refused: the parts of the error shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// A fixed word for programs.
    pub code: &'static str,
    /// The field that is wrong.
    pub param: Option<&'static str>,
    /// For people.
    pub message: String,
    /// When trying again is worth while.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    fn new(status: u16, code: &'static str, param: Option<&'static str>, message: impl ToString) -> Self {
        Self { status, code, param, message: message.to_string(), retry_after: None }
    }
}

impl From<EnrolError> for Refusal {
    fn from(error: EnrolError) -> Self {
        let bad = |code, param| Self::new(400, code, Some(param), &error);
        match &error {
            EnrolError::Transcript(_) => bad("invalid_transcript", "ref_text"),
            EnrolError::Consent => bad("invalid_consent", "consent"),
            EnrolError::Language(_) => bad("invalid_language", "languages"),
            EnrolError::Decode(super::decode::DecodeError::TooLarge { .. }) => {
                Self::new(413, "audio_too_large", Some("audio_sample"), &error)
            }
            EnrolError::Decode(_) => bad("invalid_audio", "audio_sample"),
            EnrolError::Silent => bad("no_speech", "audio_sample"),
            EnrolError::TooShort { .. } => bad("speech_too_short", "audio_sample"),
            EnrolError::TooLong { .. } => bad("speech_too_long", "audio_sample"),
            EnrolError::Missing { .. } => Self::new(501, "enrolment_unavailable", None, &error),
            EnrolError::Network(_) | EnrolError::Compute(_) | EnrolError::FirstHop(_) => {
                Self::new(500, "enrolment_failed", None, &error)
            }
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        match &error {
            StoreError::Name(_) => Self::new(400, "invalid_name", Some("name"), &error),
            StoreError::Exists(_) => Self::new(409, "voice_exists", Some("name"), &error),
            StoreError::Unknown(_) => Self::new(404, "not_found", Some("name"), &error),
            StoreError::File(_) | StoreError::Io { .. } => Self::new(500, "voice_store_failed", None, &error),
        }
    }
}

/// The three routes.
pub struct Service {
    store: Store,
    enroller: Option<Enroller>,
    options: Options,
    busy: AtomicBool,
}

impl Service {
    /// `enroller`: `None` where there is no checkpoint, and then voices can be listed and removed only.
    pub fn new(store: Store, enroller: Option<Enroller>, options: Options) -> Self {
        Self { store, enroller, options, busy: AtomicBool::new(false) }
    }

    /// Its folder.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// `GET /v1/audio/voices`. Reads memory only.
    pub fn list(&self) -> Listed {
        Listed { voices: self.store.list() }
    }

    /// Whether voices can be enrolled here at all.
    ///
    /// # Errors
    /// They cannot, and what is missing.
    pub fn can_enrol(&self) -> Result<&Enroller, Refusal> {
        self.enroller.as_ref().ok_or_else(|| {
            let message =
                "voices are enrolled with a CosyVoice3 checkpoint, and this gateway has none; set `[engine] model`";
            Refusal::new(501, "enrolment_unavailable", None, message)
        })
    }

    /// `POST /v1/audio/voices`: enrols a voice and stores it; it can be spoken with when this returns. Blocks for
    /// seconds. `now` is the time since the Unix epoch.
    ///
    /// # Errors
    /// The form is wrong, another enrolment is running, or this gateway cannot enrol.
    pub fn add(&self, form: Form, now: Duration) -> Result<Added, Refusal> {
        form.complete()?;
        let name = VoiceName::new(&form.name)?;
        let enroller = self.can_enrol()?;
        // A tenant's form replaces that tenant's voices only.
        let own = form.owner.is_none() || self.store.entry(&name).is_none_or(|entry| entry.owner == form.owner);
        if !(form.replace && own) && self.store.path(&name).exists() {
            return Err(StoreError::Exists(name).into());
        }
        let _running = Running::start(&self.busy).ok_or_else(|| Refusal {
            retry_after: Some(BUSY),
            ..Refusal::new(503, "enrolment_busy", None, "another voice is being enrolled; try again")
        })?;
        let languages = form.languages.as_deref().map(tags).unwrap_or_default();
        let request =
            Request { recording: form.audio_sample, transcript: form.ref_text, consent: form.consent, languages, now };
        let mut enrolled = enroller.enrol(request, &self.options)?;
        if let Some(owner) = form.owner {
            enrolled.voice.notes.insert(OWNER.into(), owner);
        }
        let voice = self.store.add(&name, &enrolled.voice, form.replace)?;
        tracing::info!(voice = %name, id = voice.id, seconds = voice.seconds, "voice enrolled");
        Ok(Added { voice, quality: enrolled.quality, first_hop_tokens: enrolled.first_hop })
    }

    /// Whether there is an enrolled voice of this name.
    pub fn knows(&self, name: &str) -> bool {
        VoiceName::new(name).is_ok_and(|name| self.store.entry(&name).is_some())
    }

    /// Who enrolled the voice of this name, where that is known.
    pub fn owner(&self, name: &str) -> Option<String> {
        self.store.entry(&VoiceName::new(name).ok()?)?.owner
    }

    /// `GET /v1/audio/voices/{name}`: its file. Blocks.
    ///
    /// # Errors
    /// There is no such voice, or its file is damaged.
    pub fn file(&self, name: &str) -> Result<Vec<u8>, Refusal> {
        Ok(self.store.load(&VoiceName::new(name)?)?.to_bytes())
    }

    /// `DELETE /v1/audio/voices/{name}`.
    ///
    /// # Errors
    /// There is no such voice, or it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), Refusal> {
        let name = VoiceName::new(name)?;
        self.store.remove(&name)?;
        tracing::info!(voice = %name, "voice removed");
        Ok(())
    }
}

/// Tags of a comma-separated list.
pub(super) fn tags(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|t| !t.is_empty()).map(str::to_owned).collect()
}

/// Holds the one place for as long as it lives, also through a panic.
struct Running<'a>(&'a AtomicBool);

impl<'a> Running<'a> {
    fn start(busy: &'a AtomicBool) -> Option<Self> {
        (!busy.swap(true, Ordering::AcqRel)).then_some(Self(busy))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
