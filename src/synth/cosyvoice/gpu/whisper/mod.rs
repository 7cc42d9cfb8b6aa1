//! Whisper on a CUDA device: windows of features to texts that can be written, token by token.
//!
//! Knows sizes and weights; what tokens mean and which may follow is the caller's. Each call is one bounded step and returns
//! when it is done: the stem or some layers of the encoder ([`Whisper::open`], [`Whisper::listen`]), or a few tokens, each of
//! whatever text ([`Whisper::write`]). Memory is taken at load; a step copies scores to the host, nothing else.
//!
//! # Why
//! - **One window at a time**: its 1,500 positions fill the device, and its numbers cannot depend on who else is heard.
//!   Tokens go through the GEMMs whose sums have one order whatever the batch ([`super::gemm`]), so a text is the same
//!   alone and in company, to the bit.
//! - **A stream between the voice's two** ([`super::context`]): a new turn's first audio goes before it, speech that
//!   is made ahead of its listener has a lower priority, and one context shares the device by blocks, where two would take
//!   turns of milliseconds.
//! - **A text is as long as the model allows from the beginning**: it never has to move, and none runs out of memory.

mod load;
pub(super) mod seat;

use std::sync::Arc;

use self::load::{Decoder, Encoder, Norm, Projection, Scratch};
pub use self::load::{Sizes, Stack, Tensors};
pub use self::seat::{Seat, SeatError};
use super::device::{Device, Elt, GpuError, Kernel, start};
use super::gemm::{Conv, Gemm};
use super::ledger::Part;
use super::lt::{Lt, Operands};
use super::weights::Packed;
use crate::synth::cosyvoice::backend::Hardware;

/// Tokens of one [`Whisper::write`] at most: as many as a skinny GEMM takes.
pub const ROWS: usize = super::gemm::NARROW;
/// Operations of one [`Whisper::listen`], about: one to two milliseconds of an H100.
const SHARE: f64 = 3e11;
/// Threads of a block of `hear_recall` and `hear_attend`, and positions of the latter's, as in whisper.cu.
const RECALL_THREADS: u32 = 512;
const QUERIES: usize = 64;

/// Where Whisper is loaded: a device that is its own, or one that a voice is loaded on.
#[derive(Clone)]
pub struct Place(Arc<Device>);

impl Place {
    /// Device `ordinal`, in a context of its own.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn open(ordinal: u32, hardware: &Hardware) -> Result<Self, GpuError> {
        Device::open(ordinal, hardware).map(Self)
    }

    /// Beside what runs on `device`.
    pub(super) fn beside(device: &Device) -> Result<Self, GpuError> {
        device.beside(Part::Recogniser).map(Self)
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

/// Texts besides that of its window which one window may have, on average: half of them may be written in five ways at a time. Each
/// takes three tenths of a window's memory.
const SPARE: usize = 2;

/// One token of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Which text: below [`Whisper::texts`] that of the window, and up to [`Whisper::written`] one of those besides.
    pub text: usize,
    /// Which window it is about: below [`Whisper::texts`].
    pub window: usize,
    /// Where in it, from 0; everything before is there already, or comes earlier in the same step.
    pub position: usize,
    /// Its id.
    pub token: u32,
    /// Whether the scores of what follows it are wanted.
    pub scored: bool,
}

/// Kernels of whisper.cu.
struct Kernels {
    frames: Kernel,
    halves: Kernel,
    gelu: Kernel,
    places: Kernel,
    embed: Kernel,
    norm: Kernel,
    keep: Kernel,
    recall: Kernel,
    attend: Kernel,
}

/// A window that is being listened to.
#[derive(Clone, Copy, Debug)]
struct Window {
    text: usize,
    /// Layers that are done.
    layer: usize,
}

/// A checkpoint on a device. One thread at a time uses it.
pub struct Whisper {
    device: Arc<Device>,
    sizes: Sizes,
    elt: Elt,
    gemm: Gemm,
    lt: Option<Lt>,
    kernels: Kernels,
    encoder: Encoder,
    decoder: Decoder,
    scratch: Scratch,
    texts: usize,
    written: usize,
    window: Option<Window>,
}

/// The macros of whisper.cu for heads of these widths.
pub(super) fn defines(encoder: usize, decoder: usize) -> [(&'static str, i64); 2] {
    [("EHD", encoder as i64), ("DHD", decoder as i64)]
}

/// Dynamic shared memory of a block of the encoder's attention: queries, and two stages of keys and values.
fn attend_shared(elt: Elt, head: usize) -> u32 {
    if elt == Elt::F32 { 0 } else { (5 * QUERIES * head * elt.size()) as u32 }
}

impl Whisper {
    /// Windows that can be had in mind at once, each with its text.
    pub fn texts(&self) -> usize {
        self.texts
    }

    /// Texts that can be written at once, those of windows and those besides, which are the last ones.
    pub fn written(&self) -> usize {
        self.written
    }

    /// Gives text `to` the first `length` tokens of text `from`.
    ///
    /// # Errors
    /// There are no such texts, or none is so long; or the device failed.
    pub fn copy(&mut self, from: usize, to: usize, length: usize) -> Result<(), GpuError> {
        if from >= self.written || to >= self.written || length > self.sizes.text {
            return Err(GpuError::Model(format!("{length} tokens of text {from} to {to} of {}", self.written)));
        }
        // [text][layer][position][2][width]: a layer's first positions lie side by side.
        let position = 2 * self.sizes.width * self.elt.size();
        let (layer, each) =
            ((self.sizes.text * position) as u64, (self.sizes.written_values() * self.elt.size()) as u64);
        let base = self.scratch.written.ptr;
        for n in 0..self.decoder.layers.len() as u64 {
            let at = |text: usize| base + text as u64 * each + n * layer;
            self.device.copy(at(to), at(from), length * position)?;
        }
        Ok(())
    }

    /// The sizes.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The device's name.
    pub fn device_name(&self) -> &str {
        &self.device.name
    }

    /// Begins to listen to a window: features `[frames, bands]`, for `text`. One that was not listened to to its end is
    /// forgotten.
    ///
    /// # Errors
    /// Features or text are not of these sizes, or the device failed.
    pub fn open(&mut self, text: usize, features: &[f32]) -> Result<(), GpuError> {
        let Sizes { frames, bands, width, .. } = self.sizes;
        if text >= self.texts || features.len() != frames * bands {
            let reason = format!("{} features for text {text} of {}", features.len(), self.texts);
            return Err(GpuError::Model(reason));
        }
        self.window = None;
        self.scratch.features.as_mut::<f32>()[..features.len()].copy_from_slice(features);
        self.scratch.features.send(features.len() * 4)?;
        let (d, encoder, scratch, k) = (&self.device, &self.encoder, &self.scratch, &self.kernels);
        let (x, taps, halves, y) = (&scratch.x, &scratch.taps, &scratch.halves, &scratch.y);
        let padded = encoder.conv1.k;
        let rows = |n: usize| (n as u32, 1, 1);
        start!(d, k.frames, rows(frames), 128, 0;
            scratch.features.dev.ptr, taps.ptr, frames as i32, bands as i32, padded as i32)?;
        self.project(&encoder.conv1, frames, taps.ptr, halves.ptr)?;
        self.gelu(halves.ptr, frames * width)?;
        start!(d, k.halves, rows(self.sizes.positions()), 128, 0; halves.ptr, taps.ptr, frames as i32, width as i32)?;
        self.project(&encoder.conv2, self.sizes.positions(), taps.ptr, y.ptr)?;
        let count = self.sizes.positions() * width;
        start!(d, k.places, rows(count.div_ceil(256)), 256, 0; y.ptr, encoder.places.ptr, x.ptr, count as i64)?;
        d.sync()?;
        self.window = Some(Window { text, layer: 0 });
        Ok(())
    }

    /// Goes on with the window that was opened; whether it has been heard, so that its text can be written.
    ///
    /// # Errors
    /// None was opened, or the device failed.
    pub fn listen(&mut self) -> Result<bool, GpuError> {
        let Some(Window { text, layer }) = self.window.take() else {
            return Err(GpuError::Model("no window was opened".into()));
        };
        let layers = self.encoder.layers.len();
        let end = (layer + self.sizes.layers_of(SHARE)).min(layers);
        for n in layer..end {
            self.layer(n)?;
        }
        let heard = end == layers;
        if heard {
            let states = self.scratch.normed.ptr;
            self.norm(&self.encoder.norm, self.scratch.x.ptr, self.scratch.y.ptr, states, 0, self.sizes.positions())?;
            self.remember(text)?;
        } else {
            self.window = Some(Window { text, layer: end });
        }
        self.device.sync()?;
        Ok(heard)
    }

    fn layer(&self, n: usize) -> Result<(), GpuError> {
        let (layer, scratch, positions) = (&self.encoder.layers[n], &self.scratch, self.sizes.positions());
        let Scratch { x, normed, qkv, taken, y, inner, .. } = scratch;
        // What the layer before added last is still to be added.
        let added = if n == 0 { 0 } else { y.ptr };
        self.norm(&layer.attention_norm, x.ptr, added, normed.ptr, 0, positions)?;
        self.project(&layer.qkv, positions, normed.ptr, qkv.ptr)?;
        let stack = &self.sizes.encoder;
        let grid = (stack.heads as u32, positions.div_ceil(QUERIES) as u32, 1);
        let threads = if self.elt == Elt::F32 { QUERIES as u32 } else { 128 };
        let shared = attend_shared(self.elt, self.sizes.width / stack.heads);
        start!(self.device, self.kernels.attend, grid, threads, shared;
            qkv.ptr, taken.ptr, positions as i32, self.sizes.width as i32)?;
        self.project(&layer.out, positions, taken.ptr, y.ptr)?;
        self.norm(&layer.forward_norm, x.ptr, y.ptr, normed.ptr, 0, positions)?;
        self.project(&layer.up, positions, normed.ptr, inner.ptr)?;
        self.gelu(inner.ptr, positions * stack.inner)?;
        self.project(&layer.down, positions, inner.ptr, y.ptr)
    }

    /// Keys and values of the states, for every layer of the decoder.
    fn remember(&self, text: usize) -> Result<(), GpuError> {
        let (states, positions) = (self.scratch.normed.ptr, self.sizes.positions());
        let base = self.scratch.heard.ptr + (text * self.sizes.heard_values() * self.elt.size()) as u64;
        let each = (positions * 2 * self.sizes.width * self.elt.size()) as u64;
        for (n, layer) in self.decoder.layers.iter().enumerate() {
            self.project(&layer.memory, positions, states, base + n as u64 * each)?;
        }
        Ok(())
    }

    /// The states of the window that was heard last, `[positions, width]`.
    ///
    /// # Errors
    /// The device failed.
    pub fn states(&self) -> Result<Vec<f32>, GpuError> {
        let count = self.sizes.positions() * self.sizes.width;
        let at = self.scratch.normed.ptr;
        if self.elt == Elt::F32 {
            let mut out = vec![0f32; count];
            self.device.read(at, &mut out)?;
            return Ok(out);
        }
        let mut bits = vec![0u16; count];
        self.device.read(at, &mut bits)?;
        let value = |bits: &u16| match self.elt {
            Elt::Bf16 => half::bf16::from_bits(*bits).to_f32(),
            _ => half::f16::from_bits(*bits).to_f32(),
        };
        Ok(bits.iter().map(value).collect())
    }

    /// Has `text` be about these states `[positions, width]`, in place of a window.
    ///
    /// # Errors
    /// They or the text are not of these sizes, or the device failed.
    pub fn about(&mut self, text: usize, states: &[f32]) -> Result<(), GpuError> {
        if text >= self.texts || states.len() != self.sizes.positions() * self.sizes.width {
            return Err(GpuError::Model(format!("{} states for text {text} of {}", states.len(), self.texts)));
        }
        let at = self.scratch.normed.ptr;
        match self.elt {
            Elt::F32 => self.device.write(at, states)?,
            Elt::Bf16 => self.device.write(at, &bits(states, |v| half::bf16::from_f32(v).to_bits()))?,
            Elt::F16 => self.device.write(at, &bits(states, |v| half::f16::from_f32(v).to_bits()))?,
        }
        self.window = None;
        self.remember(text)?;
        self.device.sync()
    }

    /// Writes tokens, [`ROWS`] at most, and gives scores `[vocabulary]` of what follows each that was scored, in order.
    ///
    /// # Errors
    /// A text, position or token that there is not; or the device failed.
    pub fn write(&mut self, words: &[Word]) -> Result<Vec<Vec<f32>>, GpuError> {
        let fits = |word: &Word| {
            word.text < self.written
                && word.window < self.texts
                && word.position < self.sizes.text
                && (word.token as usize) < self.sizes.vocabulary
        };
        if words.is_empty() || words.len() > ROWS || !words.iter().all(fits) {
            return Err(GpuError::Model(format!("these cannot be written: {words:?}")));
        }
        let picked: Vec<i32> = (0..words.len() as i32).filter(|n| words[*n as usize].scored).collect();
        let staged = self.scratch.words.as_mut::<i32>();
        for (to, word) in staged.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = [word.text as i32, word.position as i32, word.token as i32, word.window as i32];
        }
        staged[4 * ROWS..][..picked.len()].copy_from_slice(&picked);
        self.scratch.words.send(5 * ROWS * 4)?;
        self.step(words.len(), picked.len())?;
        let row = self.decoder.vocabulary.n;
        if !picked.is_empty() {
            self.scratch.scores.fetch(picked.len() * row * 4)?;
        }
        self.device.sync()?;
        let count = self.sizes.vocabulary;
        let scores = self.scratch.scores.as_mut::<f32>();
        Ok((0..picked.len()).map(|n| scores[n * row..][..count].to_vec()).collect())
    }

    fn step(&self, rows: usize, picked: usize) -> Result<(), GpuError> {
        let (d, k, s, sizes) = (&self.device, &self.kernels, &self.scratch, &self.sizes);
        let (width, words) = (sizes.width, s.words.dev.ptr);
        let grid = (rows as u32, 1, 1);
        let Decoder { tokens, places, layers, norm, vocabulary, .. } = &self.decoder;
        start!(d, k.embed, grid, 128, 0; words, tokens.ptr, places.ptr, s.text_x.ptr, width as i32, sizes.token_scale)?;
        let mut added = 0;
        for (n, layer) in layers.iter().enumerate() {
            self.norm(&layer.attention_norm, s.text_x.ptr, added, s.text_normed.ptr, 0, rows)?;
            self.skinny(&layer.qkv, rows, s.text_normed.ptr, s.text_qkv.ptr)?;
            let at = (n * sizes.text * 2 * width) as i64;
            start!(d, k.keep, grid, 128, 0;
                words, s.text_qkv.ptr, s.written.ptr, sizes.written_values() as i64, at, width as i32)?;
            self.recall(rows, s.text_qkv.ptr, 3 * width, s.written.ptr, sizes.written_values(), at, 0)?;
            self.skinny(&layer.out, rows, s.text_taken.ptr, s.text_y.ptr)?;
            self.norm(&layer.heard_norm, s.text_x.ptr, s.text_y.ptr, s.text_normed.ptr, 0, rows)?;
            self.skinny(&layer.query, rows, s.text_normed.ptr, s.text_qkv.ptr)?;
            let at = (n * sizes.positions() * 2 * width) as i64;
            self.recall(rows, s.text_qkv.ptr, width, s.heard.ptr, sizes.heard_values(), at, sizes.positions())?;
            self.skinny(&layer.heard_out, rows, s.text_taken.ptr, s.text_y.ptr)?;
            self.norm(&layer.forward_norm, s.text_x.ptr, s.text_y.ptr, s.text_normed.ptr, 0, rows)?;
            self.skinny(&layer.up, rows, s.text_normed.ptr, s.text_inner.ptr)?;
            self.gelu(s.text_inner.ptr, rows * sizes.decoder.inner)?;
            self.skinny(&layer.down, rows, s.text_inner.ptr, s.text_y.ptr)?;
            added = s.text_y.ptr;
        }
        if picked == 0 {
            return Ok(());
        }
        let picks = words + (4 * ROWS * 4) as u64;
        self.norm(norm, s.text_x.ptr, added, s.text_normed.ptr, picks, picked)?;
        let w = vocabulary;
        let p = Conv {
            x: s.text_normed.ptr,
            ldx: w.cin as i32,
            out: s.scores.dev.ptr,
            ldo: w.n as i32,
            rows: picked as i32,
            scale: 1.0,
            ..Conv::default()
        };
        self.gemm.linear(w, p, None, 0)
    }

    #[expect(clippy::too_many_arguments, reason = "queries, and where what they look for lies")]
    fn recall(
        &self,
        rows: usize,
        q: u64,
        ldq: usize,
        store: u64,
        per_text: usize,
        at: i64,
        length: usize,
    ) -> Result<(), GpuError> {
        let (width, heads) = (self.sizes.width, self.sizes.decoder.heads);
        let shared = 4 * if length > 0 { length } else { self.sizes.text } as u32;
        start!(self.device, self.kernels.recall, (heads as u32, rows as u32, 1), RECALL_THREADS, shared;
            self.scratch.words.dev.ptr, q, ldq as i32, store, per_text as i64, at, length as i32, width as i32,
            self.scratch.text_taken.ptr)
    }

    /// `x += add`, and the norm of it. `picks`: of these rows only; 0: of all.
    fn norm(&self, norm: &Norm, x: u64, add: u64, out: u64, picks: u64, rows: usize) -> Result<(), GpuError> {
        start!(self.device, self.kernels.norm, (rows as u32, 1, 1), 128, 0;
            x, add, norm.weight.ptr, norm.bias.ptr, out, picks, self.sizes.width as i32)
    }

    /// The exact GELU of an even number of values, in place.
    fn gelu(&self, x: u64, count: usize) -> Result<(), GpuError> {
        let grid = (count.div_ceil(512) as u32, 1, 1);
        start!(self.device, self.kernels.gelu, grid, 256, 0; x, count as i64)
    }

    /// Rows of a window.
    fn project(&self, p: &Projection, rows: usize, x: u64, y: u64) -> Result<(), GpuError> {
        match (&self.lt, &p.plain, &p.packed) {
            (Some(lt), Some((w, bias)), _) => lt.run(p.shape(rows), Operands::whole(x, w.ptr, bias.ptr, y)),
            (_, _, Some(packed)) => self.skinny(packed, rows, x, y),
            _ => Err(GpuError::Model("a GEMM has no weights".into())),
        }
    }

    /// Rows whose sums do not depend on how many there are.
    fn skinny(&self, w: &Packed, rows: usize, x: u64, y: u64) -> Result<(), GpuError> {
        let (n, k) = (w.n as i32, w.cin as i32);
        let p = Conv { x, ldx: k, oute: y, lde: n, ldo: n, rows: rows as i32, scale: 1.0, ..Conv::default() };
        self.gemm.linear(w, p, None, 0)
    }
}

fn bits(values: &[f32], of: impl Fn(f32) -> u16) -> Vec<u16> {
    values.iter().map(|value| of(*value)).collect()
}
