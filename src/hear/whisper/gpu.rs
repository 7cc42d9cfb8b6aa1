//! Whisper on a GPU: a checkpoint for the kernels of [`crate::synth::cosyvoice::gpu::whisper`], and who runs its steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::config::{Config, LoadError, Sizes};
use super::layers::Weights;
use super::steps::{Machine, Steps, Word};
use super::tokens::Tokens;
use super::{HearError, Whisper, verify};
use crate::clock;
use crate::synth::cosyvoice::backend::Hardware;
use crate::synth::cosyvoice::gpu::whisper::{self as network, ROWS, Stack, Tensors};
pub use crate::synth::cosyvoice::gpu::whisper::{Seat, SeatError};
pub use crate::synth::cosyvoice::gpu::{Elt, GpuError};
use crate::voice::features::Matrix;

/// Texts that are written at once at most, each with its window.
pub const TEXTS: usize = 24;
/// How long a device that was lost is left alone before it is opened again.
const RETRY: Duration = Duration::from_secs(60);

/// A seat for the checkpoint in `dir`, which is read whenever it comes to a device.
///
/// # Errors
/// The checkpoint's sizes or vocabulary cannot be used.
pub fn seat(dir: &Path, elt: Elt) -> Result<Seat, LoadError> {
    let config = Config::load(dir)?;
    let sizes = sizes_of(&config.sizes);
    let file = dir.join(verify::WEIGHTS);
    Ok(Seat::new(move |place| {
        let mut weights = Weights::read(&file).map_err(|e| GpuError::Model(e.to_string()))?;
        network::Whisper::load(place, &sizes, &mut weights, elt, TEXTS)
    }))
}

fn sizes_of(sizes: &Sizes) -> network::Sizes {
    network::Sizes {
        width: sizes.d_model,
        bands: sizes.num_mel_bins,
        frames: sizes.frames(),
        text: sizes.max_target_positions,
        vocabulary: sizes.vocab_size,
        encoder: Stack {
            layers: sizes.encoder_layers,
            heads: sizes.encoder_attention_heads,
            inner: sizes.encoder_ffn_dim,
        },
        decoder: Stack {
            layers: sizes.decoder_layers,
            heads: sizes.decoder_attention_heads,
            inner: sizes.decoder_ffn_dim,
        },
        token_scale: if sizes.scale_embedding { (sizes.d_model as f32).sqrt() } else { 1.0 },
    }
}

impl Tensors for Weights {
    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, GpuError> {
        let model = |e: String| GpuError::Model(e);
        let tensor = self.take(name, shape).map_err(|e| model(e.to_string()))?;
        tensor.flatten_all().and_then(|flat| flat.to_vec1()).map_err(|e| model(e.to_string()))
    }
}

/// A device that is Whisper's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own {
    /// Its number.
    pub ordinal: u32,
    /// How it is used.
    pub hardware: Hardware,
}

impl Whisper {
    /// The checkpoint in `dir` on a GPU: in `seat`, onto which a voice loads it, or which is `own`, and is loaded now.
    ///
    /// # Errors
    /// The checkpoint cannot be used; or its own device cannot.
    pub fn on_gpu(dir: &Path, seat: Seat, own: Option<Own>) -> Result<Self, LoadError> {
        let config = Config::load(dir)?;
        let tokens = Tokens::load(dir, &config)?;
        let device = |reason: String| LoadError::File { path: PathBuf::from("cuda"), reason };
        if let Some(own) = &own {
            seat.open(own.ordinal, &own.hardware).map_err(|e| device(e.to_string()))?;
        }
        let steps = steps(seat, own).map_err(|e| device(e.to_string()))?;
        Ok(Self { config, tokens, engine: Box::new(steps) })
    }
}

/// Who runs the steps of what sits there; on its own device nothing goes before it.
pub(super) fn steps(seat: Seat, own: Option<Own>) -> std::io::Result<Steps> {
    let precedence = if own.is_some() { None } else { Some(seat.precedence().clone()) };
    let generation = seat.generation();
    let own = own.map(Arc::new);
    let machine = OnSeat { seat, generation, texts: TEXTS, spare: 0, own, tried: clock::now() };
    Steps::start(Box::new(machine), precedence)
}

/// What sits there, as a machine.
struct OnSeat {
    seat: Seat,
    /// Which of those that sat there the texts are on.
    generation: u64,
    texts: usize,
    spare: usize,
    own: Option<Arc<Own>>,
    /// When its own device was opened last.
    tried: Instant,
}

impl OnSeat {
    fn with<T>(&mut self, work: impl FnOnce(&mut network::Whisper) -> Result<T, GpuError>) -> Result<T, HearError> {
        self.seat.with(self.generation, work).map_err(|error| {
            if matches!(error, SeatError::Empty) || !self.seat.is_taken() {
                self.texts = 0;
            }
            HearError::Lost(error.to_string())
        })
    }
}

impl Machine for OnSeat {
    fn renew(&mut self) {
        self.generation = self.seat.generation();
        let has = self.seat.with(self.generation, |whisper| Ok((whisper.texts(), whisper.written())));
        let (texts, written) = has.unwrap_or((0, 0));
        (self.texts, self.spare) = (texts, written - texts);
        let now = clock::now();
        if let Some(own) = self.own.as_ref().filter(|_| self.texts == 0 && now >= self.tried + RETRY) {
            self.tried = now;
            let (seat, own) = (self.seat.clone(), own.clone());
            // On a thread of its own: the CPU recognises meanwhile.
            let opening = std::thread::Builder::new().name("hear-open".into()).spawn(move || {
                match seat.open(own.ordinal, &own.hardware) {
                    Ok(()) => tracing::info!(device = own.ordinal, "the recogniser is on its GPU again"),
                    Err(error) => tracing::warn!(%error, "the recogniser's GPU is still lost"),
                }
            });
            if let Err(error) = opening {
                tracing::warn!(%error, "no thread to open the recogniser's GPU again");
            }
        }
    }

    fn texts(&self) -> usize {
        self.texts
    }

    fn spare(&self) -> usize {
        self.spare
    }

    fn rows(&self) -> usize {
        ROWS
    }

    fn open(&mut self, text: usize, features: &Matrix) -> Result<(), HearError> {
        self.with(|whisper| whisper.open(text, &features.data))
    }

    fn listen(&mut self) -> Result<bool, HearError> {
        self.with(network::Whisper::listen)
    }

    fn copy(&mut self, from: usize, to: usize, length: usize) -> Result<(), HearError> {
        self.with(|whisper| whisper.copy(from, to, length))
    }

    fn write(&mut self, words: &[Word]) -> Result<Vec<Vec<f32>>, HearError> {
        self.with(|whisper| whisper.write(words))
    }

    fn states(&mut self) -> Result<Vec<f32>, HearError> {
        self.with(|whisper| whisper.states())
    }

    fn about(&mut self, text: usize, states: &[f32]) -> Result<(), HearError> {
        self.with(|whisper| whisper.about(text, states))
    }
}
