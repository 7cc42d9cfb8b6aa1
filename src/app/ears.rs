//! What recognises callers: from `[recognizer]` to ears, with a line for the log.

use std::path::Path;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::hear::config::Kind;
use crate::hear::http::Http;
use crate::hear::pool::{Pool, PoolError};
use crate::hear::smart_turn::SmartTurn;
use crate::hear::whisper::gpu::{self as whisper, Elt, Own, Seat};
use crate::hear::{Ears, Recogniser, Recognizer, Turns};
use crate::synth::cosyvoice::backend::Hardware;
use crate::synth::cosyvoice::gpu;

/// Where Whisper is to compute.
pub(super) enum Place {
    Cpu,
    /// On a GPU: beside a voice, which loads it, or by itself.
    Gpu(Seat, Option<Own>),
}

/// A seat for Whisper, and the GPU that it is to be on where one is named; `None`: the CPU, or nothing, recognises.
pub(super) fn seat(config: &Recognizer) -> Result<Option<(Seat, Option<u32>)>, String> {
    let Some(model) = config.model.as_ref().filter(|_| config.chosen() == Kind::Whisper && config.device != "cpu")
    else {
        return Ok(None);
    };
    let named = config.ordinal().map_err(|error| format!("[recognizer] {error}"))?;
    match (gpu::absent(), named) {
        (Some(_), None) => Ok(None),
        (Some(why), Some(_)) => Err(format!("[recognizer] device = \"{}\": {why}", config.device)),
        (None, _) => {
            let seat = whisper::seat(Path::new(model), Elt::F16).map_err(|e| PoolError::from(e).to_string())?;
            Ok(Some((seat, named)))
        }
    }
}

/// What becomes of that: `left` is what no voice took.
pub(super) fn place(seat: Option<Seat>, left: Option<(Seat, Option<u32>)>, hardware: Hardware) -> Place {
    match (seat, left) {
        (Some(seat), None) => Place::Gpu(seat, None),
        (_, Some((seat, named))) => {
            let ordinal = named.unwrap_or_default();
            match gpu::unusable(ordinal, &hardware).filter(|_| named.is_none()) {
                Some(why) => {
                    tracing::info!("Whisper recognises on the CPU: {why}");
                    Place::Cpu
                }
                None => Place::Gpu(seat, Some(Own { ordinal, hardware })),
            }
        }
        (None, None) => Place::Cpu,
    }
}

/// The ears of a configuration; `None` where nothing recognises callers.
pub(super) async fn choose(config: &Recognizer, turns: &Turns, place: Place) -> Result<Option<Ears>, String> {
    let Some(ears) = ears(config, turns.clone(), place).await? else { return Ok(None) };
    let Some(file) = turns.network() else { return Ok(Some(ears)) };
    tracing::info!("Smart Turn judges when callers have finished: {}", file.display());
    let file = file.to_owned();
    let judge = spawn_blocking(move || SmartTurn::start(&file, 0)).await;
    let judge = judge.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    Ok(Some(ears.judging(Some(Arc::new(judge)))))
}

async fn ears(config: &Recognizer, turns: Turns, place: Place) -> Result<Option<Ears>, String> {
    if let Some(services) = config.services() {
        for service in &services.services {
            tracing::info!("a service recognises callers as they speak: {} at {}", service.dialect.kind(), service.url);
        }
        let (language, apology) = (config.language.clone(), config.apology.clone());
        return Ok(Some(Ears::streaming(services, language, turns, apology, Handle::current())));
    }
    let recogniser: Arc<dyn Recogniser> = match config.chosen() {
        Kind::Off | Kind::Auto | Kind::Deepgram | Kind::OpenAi | Kind::Vllm => return Ok(None),
        Kind::Whisper => {
            let model = config.model.clone().ok_or("[recognizer] model is not set")?;
            let (language, threads) = (config.language.clone(), config.threads);
            let or_cpu = config.device == "auto";
            let start = move || {
                let (model, language) = (Path::new(&model), language.as_deref());
                match place {
                    Place::Cpu => {
                        tracing::info!("Whisper recognises callers: {}", model.display());
                        Pool::start(model, language, threads)
                    }
                    Place::Gpu(seat, own) => {
                        let whose = if own.is_some() { "of its own" } else { "that speaks" };
                        tracing::info!("Whisper recognises callers on a GPU {whose}: {}", model.display());
                        match Pool::start_on(seat, own, model, language, threads) {
                            Err(error @ PoolError::Load(_)) if or_cpu => {
                                tracing::warn!("Whisper recognises on the CPU: {error}");
                                Pool::start(model, language, threads)
                            }
                            result => result,
                        }
                    }
                }
            };
            // Reading a checkpoint takes seconds.
            let started = spawn_blocking(start).await;
            Arc::new(started.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?)
        }
        Kind::Http => {
            tracing::info!("a service recognises callers: {}", config.url.as_deref().unwrap_or_default());
            Arc::new(Http::new(config)?)
        }
    };
    Ok(Some(Ears::new(recogniser, config.language.clone(), turns, config.apology.clone(), Handle::current())))
}
