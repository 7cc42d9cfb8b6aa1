//! What recognises callers: from `[recognizer]` to ears, with a line for the log.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::hear::config::Kind;
use crate::hear::http::Http;
use crate::hear::pool::Pool;
use crate::hear::smart_turn::SmartTurn;
use crate::hear::{Ears, Recogniser, Recognizer, Turns};

/// The ears of a configuration; `None` where nothing recognises callers.
pub(super) async fn choose(config: &Recognizer, turns: &Turns) -> Result<Option<Ears>, String> {
    let Some(ears) = ears(config, turns.clone()).await? else { return Ok(None) };
    let Some(file) = turns.network() else { return Ok(Some(ears)) };
    tracing::info!("Smart Turn judges when callers have finished: {}", file.display());
    let file = file.to_owned();
    let judge = spawn_blocking(move || SmartTurn::start(&file, 0)).await;
    let judge = judge.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    Ok(Some(ears.judging(Some(Arc::new(judge)))))
}

async fn ears(config: &Recognizer, turns: Turns) -> Result<Option<Ears>, String> {
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
            tracing::info!("Whisper recognises callers: {model}");
            let (language, threads) = (config.language.clone(), config.threads);
            // Reading a checkpoint takes seconds.
            let started =
                spawn_blocking(move || Pool::start(&PathBuf::from(model), language.as_deref(), threads)).await;
            Arc::new(started.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?)
        }
        Kind::Http => {
            tracing::info!("a service recognises callers: {}", config.url.as_deref().unwrap_or_default());
            Arc::new(Http::new(config)?)
        }
    };
    Ok(Some(Ears::new(recogniser, config.language.clone(), turns, config.apology.clone(), Handle::current())))
}
