//! The language model on the device: fixed slots of cache, prefill of many prefixes at once, and decode rounds that
//! need the host only for their result.
//!
//! A decode round is one graph for its width. Between the rounds of a call nothing leaves the device: the drawn id
//! becomes the next input there.
//!
//! Why this file is long: prefill, decoding and choosing how both multiply share every buffer of the network.
//!
//! # Why
//! RMSNorm costs no pass of its own: its weights are folded into the product that follows, and its scale is a
//! factor per row that the product finds out while it reads the row. Wide products get its sum of squares from the
//! product that made the row.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::device::{Buf, Device, Elt, GpuError, Graph, Kernel, Staging, Timer, start};
use super::gemm::{Act, Conv, Gemm, PARTS, Squares, WHOLE_PARTS, WIDE, Wide};
use super::lt::Shape;
use super::tuned::{Finding, Tuned};
use super::weights::{Packed, Packer, Piece, Source, padded};
use crate::synth::cosyvoice::backend::{Embed, MinLength, Sampling};
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::LlmConfig;

/// Widths that a decode graph is recorded for.
pub(super) const WIDTHS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256];
/// Most rounds of one call.
pub(super) const ROUNDS: usize = 32;
/// Positions of one prefill pass.
const PASS: usize = 4096;
/// Rows that the ways of wide products are timed at; fewer take the next.
const BUCKETS: [usize; 11] = [16, 32, 64, 96, 128, 192, 256, 384, 768, 1536, PASS];
/// Warps of an attention block, each with buffers of sixteen keys and values: two, or four for few rows.
const ATTEND_WARPS: usize = 8;
/// Tiles of keys and of values that a warp has room for, and for few rows.
const TILES: usize = 4;
const DEEP_TILES: usize = 8;
/// Dynamic shared memory that attention may take.
const ATTEND_SHARED: u32 = 200 << 10;
/// What it has besides, at most: queries over heads of 64 values, and every warp's maxima and sums.
const ATTEND_STATIC: u32 = 4 << 10;
/// Rows up to which an attention block may have a multiprocessor to itself.
const FEW: usize = 32;
/// Scores of a row that can be drawn from, as in draw.cu.
const DRAWN: usize = 8192;
const SPEECH_BIT: u32 = 0x8000_0000;
const RECENT: usize = 16;

/// `Seq` of llm.cu.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Seq {
    pos: i32,
    input: u32,
    decoded: i32,
    done: i32,
    key: [u32; 2],
    min_len: i32,
    max_len: i32,
    mask_to: i32,
    forced: i32,
    recent: [i32; RECENT],
}

/// `Llm` of llm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Args {
    text: u64,
    speech: u64,
    rope: u64,
    cache: u64,
    seq: u64,
    forced: u64,
    x: u64,
    xe: u64,
    row_slot: u64,
    row_pos: u64,
    slots: u64,
    ids: u64,
    slot_stride: i64,
    layer_stride: i64,
    hidden: i32,
    positions: i32,
    rows: i32,
    tiled_rows: i32,
}

/// `Draw` of draw.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Draw {
    top_p: f32,
    tau_count: f32,
    top_k: i32,
    window: i32,
    speech_tokens: i32,
}

struct Layer {
    qkv: Packed,
    out: Packed,
    gate_up: Packed,
    down: Packed,
}

/// A product of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Product {
    Qkv,
    Out,
    GateUp,
    Down,
    Head,
}

const PRODUCTS: [Product; 5] = [Product::Qkv, Product::Out, Product::GateUp, Product::Down, Product::Head];

/// The fastest ways of wide products; all give the same bits.
static WAYS: Tuned<Wide> = Tuned::new();

impl Finding for Wide {
    const KIND: &'static str = "wide 1";

    fn to_bytes(self) -> Vec<u8> {
        vec![self as u8]
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        WIDE.into_iter().find(|way| *bytes == [*way as u8])
    }
}

/// What one decode call gave for one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Drawn {
    pub(super) tokens: Vec<u32>,
    pub(super) eos: bool,
    pub(super) bad: bool,
}

/// The model and its slots.
pub(super) struct Llm {
    device: Arc<Device>,
    config: LlmConfig,
    gemm: Gemm,
    /// Whether every product's inputs come in the pieces of tiled operands.
    tileable: bool,
    /// The fastest way of each product for up to so many rows.
    ways: BTreeMap<(usize, Product), Wide>,
    layers: Vec<Layer>,
    head: Packed,
    args: Args,
    draw: Draw,
    embed: Kernel,
    append: Kernel,
    attend: Kernel,
    /// As `attend`, with more under way; for few rows, where a block has room for it.
    attend_deep: Option<Kernel>,
    /// For prefixes.
    attend_prefix: Kernel,
    sample: Kernel,
    qkv: Buf,
    heard: Buf,
    inner: Buf,
    logits: Buf,
    rms: Buf,
    /// Sums of squares of the residual stream's rows, where activations are tiled.
    squares: Buf,
    /// Slot of each row, then how many results each row has.
    rows: Staging,
    results: Staging,
    /// Inputs, slots and positions of a prefill pass, then sequences of its slots.
    prefix: Staging,
    graphs: BTreeMap<usize, Graph>,
    slots: usize,
    #[expect(dead_code, reason = "buffers that are used by address")]
    owned: Vec<Buf>,
}

impl Llm {
    /// Loads the model with room for `slots` sequences of `positions` each.
    pub(super) fn load(
        packer: &Packer,
        source: &dyn Source,
        config: &LlmConfig,
        slots: usize,
        positions: usize,
    ) -> Result<Self, GpuError> {
        let device = &packer.device;
        let elt = packer.elt;
        let (hidden, hd) = (config.hidden, config.head_dim);
        let (queries, keys, inner) = (config.heads * hd, config.kv_heads * hd, config.intermediate);
        if hidden % 32 != 0 || inner % 32 != 0 || queries % 32 != 0 || keys % 16 != 0 {
            return Err(GpuError::Model(format!("the language model's sizes do not fit the kernels: {config:?}")));
        }
        let group = config.heads / config.kv_heads;
        if !attends(hd, group, elt) || elt != Elt::F32 && attend_shared(TILES, hd) + ATTEND_STATIC > device.shared {
            return Err(GpuError::Model(format!(
                "attention has no room for {group} heads of {hd} a key head in {elt:?}"
            )));
        }
        if config.speech_rows() > DRAWN {
            return Err(GpuError::Model(format!("more than {DRAWN} speech ids cannot be drawn from on the GPU")));
        }
        if config.sampling.top_k > 64 || config.sampling.window > RECENT {
            return Err(GpuError::Model("top_k above 64 or a window above 16 cannot be drawn from on the GPU".into()));
        }
        let floats = |key: &str, shape: &[usize]| source.floats(Part::Llm, key, shape);
        let body = "llm.model.model";
        let mut layers = Vec::with_capacity(config.layers);
        for n in 0..config.layers {
            let name = |part: &str| format!("{body}.layers.{n}.{part}");
            let weight = |part: &str, rows: usize, cols: usize| floats(&name(&format!("{part}.weight")), &[rows, cols]);
            let norm = floats(&name("input_layernorm.weight"), &[hidden])?;
            let (q, k, v) = (
                weight("self_attn.q_proj", queries, hidden)?,
                weight("self_attn.k_proj", keys, hidden)?,
                weight("self_attn.v_proj", keys, hidden)?,
            );
            let mut bias = Vec::with_capacity(queries + 2 * keys);
            for (part, rows) in [("q", queries), ("k", keys), ("v", keys)] {
                bias.extend_from_slice(&floats(&name(&format!("self_attn.{part}_proj.bias")), &[rows])?);
            }
            let piece = |values, n, mul, off| Piece { values, n, mul, off };
            let qkv = packer.pack(
                &[piece(&q, queries, 1, 0), piece(&k, keys, 1, queries), piece(&v, keys, 1, queries + keys)],
                queries + 2 * keys,
                hidden,
                1,
                Some(&bias),
                Some(&norm),
            )?;
            let out = packer.whole(&weight("self_attn.o_proj", hidden, queries)?, hidden, queries, 1, None)?;
            let norm = floats(&name("post_attention_layernorm.weight"), &[hidden])?;
            let (gate, up) = (weight("mlp.gate_proj", inner, hidden)?, weight("mlp.up_proj", inner, hidden)?);
            // A gate beside what it gates, so that one thread has both.
            let both = [piece(&gate, inner, 2, 0), piece(&up, inner, 2, 1)];
            let gate_up = packer.pack(&both, 2 * inner, hidden, 1, None, Some(&norm))?;
            let down = packer.whole(&weight("mlp.down_proj", hidden, inner)?, hidden, inner, 1, None)?;
            let called = |name, w: Packed| packer.tiled(Packed { name, ..w });
            layers.push(Layer {
                qkv: called("qkv", qkv)?,
                out: called("out", out)?,
                gate_up: called("gate-up", gate_up)?,
                down: called("down", down)?,
            });
        }
        let norm = floats(&format!("{body}.norm.weight"), &[hidden])?;
        let speech_rows = config.speech_rows();
        let head_values = floats("llm_decoder.weight", &[speech_rows, hidden])?;
        let head_piece = [Piece { values: &head_values, n: speech_rows, mul: 1, off: 0 }];
        let head = packer.pack(&head_piece, speech_rows, hidden, 1, None, Some(&norm))?;
        let head = packer.tiled(Packed { name: "head", ..head })?;
        let text = packer.elements(&floats(&format!("{body}.embed_tokens.weight"), &[config.vocab, hidden])?)?;
        let speech = packer.elements(&floats("speech_embedding.weight", &[speech_rows, hidden])?)?;
        let rope = device.upload("rotary angles", &rope_table(positions, hd, config.rope_theta))?;

        let module = device.compile("llm.cu", &[super::COMMON, super::LLM, super::DRAW], elt, &defines(config))?;
        let size = elt.size();
        let layer_stride = 2 * config.kv_heads * positions * hd;
        let slot_stride = layer_stride * config.layers;
        // Attention reads whole tiles: what lies past the end counts for nothing, but it must be a number.
        let cache = device.zeros("language model slots", slots * slot_stride * size)?;
        let seq = device.zeros("sequences", slots * size_of::<Seq>())?;
        let forced = device.zeros("forced tokens", slots * positions * 4)?;
        let x = device.zeros("activations", PASS * hidden * 4)?;
        let xe = device.zeros("activations", PASS * hidden * size)?;
        let rows = Staging::new(device, "rows", 2 * 4 * WIDTHS[WIDTHS.len() - 1])?;
        let row_slot = device.zeros("rows", PASS * 4)?;
        let row_pos = device.zeros("rows", PASS * 4)?;
        let prefix = Staging::new(device, "prefixes", 3 * 4 * PASS + slots * size_of::<Seq>())?;
        let args = Args {
            text: text.ptr,
            speech: speech.ptr,
            rope: rope.ptr,
            cache: cache.ptr,
            seq: seq.ptr,
            forced: forced.ptr,
            x: x.ptr,
            xe: xe.ptr,
            row_slot: row_slot.ptr,
            row_pos: row_pos.ptr,
            slots: rows.dev.ptr,
            ids: prefix.dev.ptr,
            slot_stride: slot_stride as i64,
            layer_stride: layer_stride as i64,
            hidden: hidden as i32,
            positions: positions as i32,
            rows: 0,
            tiled_rows: 0,
        };
        let ras = config.sampling;
        Ok(Self {
            gemm: Gemm::with_wide(device, elt)?,
            tileable: hidden % 64 == 0 && inner % 64 == 0 && queries % 64 == 0 && hidden <= WHOLE_PARTS,
            ways: BTreeMap::new(),
            embed: module.kernel("llm_embed", 0)?,
            append: module.kernel("llm_append", 0)?,
            attend: module.kernel("llm_attend", ATTEND_SHARED)?,
            attend_deep: (elt != Elt::F32 && attend_shared(DEEP_TILES, hd) + ATTEND_STATIC <= device.shared)
                .then(|| module.kernel("llm_attend_deep", ATTEND_SHARED))
                .transpose()?,
            attend_prefix: module.kernel("llm_attend_prefix", ATTEND_SHARED)?,
            sample: module.kernel("llm_draw", (padded(speech_rows) * 4).max(49 << 10) as u32)?,
            qkv: device.zeros("activations", PASS * (queries + 2 * keys) * 4)?,
            heard: device.zeros("activations", PASS * queries * size)?,
            inner: device.zeros("activations", PASS * inner * size)?,
            logits: device.zeros("scores", WIDTHS[WIDTHS.len() - 1] * head.n * 4)?,
            rms: device.zeros("activations", PASS * 4)?,
            squares: device.zeros("activations", PARTS * PASS * 4)?,
            draw: Draw {
                top_p: ras.top_p,
                tau_count: ras.window as f32 * ras.tau,
                top_k: ras.top_k as i32,
                window: ras.window as i32,
                speech_tokens: config.speech_tokens as i32,
            },
            results: Staging::new(device, "results", 4 * ROUNDS * WIDTHS[WIDTHS.len() - 1])?,
            device: device.clone(),
            config: config.clone(),
            layers,
            head,
            args,
            rows,
            prefix,
            graphs: BTreeMap::new(),
            slots,
            owned: vec![text, speech, rope, cache, seq, forced, x, xe, row_slot, row_pos],
        })
    }

    /// Clears a slot whose values became no numbers, so that its next utterance does not read them.
    pub(super) fn scrub(&self, slot: usize) -> Result<(), GpuError> {
        let (at, bytes) = self.slot_range(slot);
        self.device.fill_zero(at, bytes)
    }

    /// Bytes of one slot's cache.
    fn slot_bytes(&self) -> usize {
        self.args.slot_stride as usize * self.gemm.elt.size()
    }

    /// Where a slot's cache lies, and its bytes.
    pub(super) fn slot_range(&self, slot: usize) -> (u64, usize) {
        let bytes = self.slot_bytes();
        (self.args.cache + (slot * bytes) as u64, bytes)
    }

    /// Runs whole prefixes. All but the last position goes through the network now; the last is the first input of
    /// decoding. Prefixes must not be empty and ids must be in range.
    pub(super) fn prefill(&mut self, rows: &[(usize, &[Embed], &Sampling)]) -> Result<(), GpuError> {
        let mut at = 0usize;
        let seqs = 3 * PASS;
        for (n, (slot, prefix, sampling)) in rows.iter().enumerate() {
            let seq = self.sequence(prefix, sampling);
            let words = size_of::<Seq>() / 4;
            // SAFETY: `Seq` is plain 32-bit words without padding.
            let bits = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&seq).cast::<u32>(), words) };
            self.prefix.as_mut::<u32>()[seqs + n * words..][..words].copy_from_slice(bits);
            if let Some(forced) = &sampling.forced {
                let to = self.args.forced + (*slot * self.args.positions as usize * 4) as u64;
                let count = forced.len().min(self.args.positions as usize);
                self.device.write(to, &forced[..count])?;
            }
        }
        let id = |e: &Embed| match *e {
            Embed::Text(id) => id,
            Embed::Speech(id) => id | SPEECH_BIT,
        };
        let send_sequences = |this: &Self| -> Result<(), GpuError> {
            for (n, (slot, ..)) in rows.iter().enumerate() {
                let (from, size) = (this.prefix.dev.ptr + (seqs * 4) as u64, size_of::<Seq>());
                this.device.copy(this.args.seq + (slot * size) as u64, from + (n * size) as u64, size)?;
            }
            Ok(())
        };
        let mut sent = false;
        for (slot, prefix, _) in rows {
            let count = prefix.len().saturating_sub(1);
            for (pos, e) in prefix[..count].iter().enumerate() {
                let words = self.prefix.as_mut::<u32>();
                words[at] = id(e);
                words[PASS + at] = *slot as u32;
                words[2 * PASS + at] = pos as u32;
                at += 1;
                if at == PASS {
                    self.pass(at)?;
                    if !sent {
                        send_sequences(self)?;
                        sent = true;
                    }
                    // The staging memory is written again.
                    self.device.sync()?;
                    at = 0;
                }
            }
        }
        self.pass(at)?;
        if !sent {
            send_sequences(self)?;
        }
        self.device.sync()
    }

    fn sequence(&self, prefix: &[Embed], s: &Sampling) -> Seq {
        let first = match prefix.last() {
            Some(Embed::Text(id)) => *id,
            Some(Embed::Speech(id)) => id | SPEECH_BIT,
            None => SPEECH_BIT,
        };
        let mask_to = match s.min_length {
            MinLength::Intended => self.config.speech_rows(),
            MinLength::Reference => self.config.speech_tokens + 1,
        };
        let clamp = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        Seq {
            pos: prefix.len().saturating_sub(1) as i32,
            input: first,
            key: s.key,
            min_len: clamp(s.min_len),
            max_len: clamp(s.max_len),
            mask_to: mask_to as i32,
            forced: s.forced.as_ref().map_or(0, |f| f.len() as i32),
            ..Seq::default()
        }
    }

    /// Puts a slot behind `sequence`, of which all but the last position is in its cache.
    pub(super) fn rewind(&mut self, slot: usize, sequence: &[Embed], sampling: &Sampling) -> Result<(), GpuError> {
        let seq = self.sequence(sequence, sampling);
        self.device.write(self.args.seq + (slot * size_of::<Seq>()) as u64, &[seq])
    }

    fn pass(&mut self, rows: usize) -> Result<(), GpuError> {
        self.prefix.send(self.prefix.dev.bytes)?;
        if rows == 0 {
            return Ok(());
        }
        self.device.copy(self.args.row_slot, self.prefix.dev.ptr + 4 * PASS as u64, rows * 4)?;
        self.device.copy(self.args.row_pos, self.prefix.dev.ptr + 8 * PASS as u64, rows * 4)?;
        self.network(rows, true)
    }

    /// All layers over `rows` rows; what they are is on the device.
    fn network(&self, rows: usize, prefill: bool) -> Result<(), GpuError> {
        let c = &self.config;
        let tiled = self.tiled(rows);
        let args = Args { rows: rows as i32, tiled_rows: if tiled { PASS as i32 } else { 0 }, ..self.args };
        let grid = (rows as u32, 1, 1);
        start!(self.device, self.embed, grid, 256, 0; args, i32::from(prefill))?;
        if tiled {
            self.gemm.squares(args.xe, self.squares.ptr, PASS, rows, c.hidden)?;
        }
        let f32 = self.gemm.elt == Elt::F32;
        // The kernel, its tiles, and whether a block has two rows.
        let (attend, tiles, pair) = match self.attend_deep {
            _ if prefill => (self.attend_prefix, TILES, !f32),
            Some(deep) if rows <= FEW => (deep, DEEP_TILES, false),
            _ => (self.attend, TILES, false),
        };
        let shared = if f32 { 0 } else { attend_shared(tiles, c.head_dim) };
        let heads = (if pair { rows.div_ceil(2) } else { rows } as u32, c.kv_heads as u32, 1);
        for n in 0..self.layers.len() {
            self.product(Product::Qkv, n, rows)?;
            if prefill {
                start!(self.device, self.append, grid, 128, 0; args, self.qkv.ptr, n as i32)?;
            }
            start!(self.device, attend, heads, 256, shared; args, self.qkv.ptr, self.heard.ptr, n as i32)?;
            self.product(Product::Out, n, rows)?;
            self.product(Product::GateUp, n, rows)?;
            self.product(Product::Down, n, rows)?;
        }
        Ok(())
    }

    /// Whether activations of `rows` rows are tiled.
    fn tiled(&self, rows: usize) -> bool {
        self.tileable && self.gemm.tiled(rows)
    }

    /// One product over `rows` rows, of layer `layer` where it is a layer's.
    fn product(&self, which: Product, layer: usize, rows: usize) -> Result<(), GpuError> {
        let bucket = BUCKETS.into_iter().find(|&most| most >= rows).unwrap_or(PASS);
        self.product_by(which, layer, rows, self.ways.get(&(bucket, which)).copied())
    }

    fn weights(&self, which: Product, layer: usize) -> &Packed {
        let at = &self.layers[layer];
        match which {
            Product::Qkv => &at.qkv,
            Product::Out => &at.out,
            Product::GateUp => &at.gate_up,
            Product::Down => &at.down,
            Product::Head => &self.head,
        }
    }

    fn product_by(&self, which: Product, layer: usize, rows: usize, way: Option<Wide>) -> Result<(), GpuError> {
        let c = &self.config;
        let (a, w) = (&self.args, self.weights(which, layer));
        let width = ((c.heads + 2 * c.kv_heads) * c.head_dim) as i32;
        let tiled = self.tiled(rows);
        // Of tiled operands the leading dimension is their height.
        let ld = |width: usize| if tiled { PASS as i32 } else { width as i32 };
        let hidden = ld(c.hidden);
        let base = Conv { rows: rows as i32, scale: 1.0, ..Conv::default() };
        let normed = Conv { x: a.xe, ldx: hidden, ..base };
        let residual = Conv { res: a.x, out: a.x, oute: a.xe, ldo: c.hidden as i32, lde: hidden, ..base };
        let p = match which {
            Product::Qkv => Conv { out: self.qkv.ptr, ldo: width, ..normed },
            Product::Out => Conv { x: self.heard.ptr, ldx: ld(c.heads * c.head_dim), ..residual },
            Product::GateUp => Conv { oute: self.inner.ptr, lde: ld(c.intermediate), act: Act::SiluGate, ..normed },
            Product::Down => Conv { x: self.inner.ptr, ldx: ld(c.intermediate), ..residual },
            Product::Head => Conv { out: self.logits.ptr, ldo: self.head.n as i32, ..normed },
        };
        let makes_rows = matches!(which, Product::Out | Product::Down);
        let norm = (!makes_rows).then_some((c.rms_eps as f32, c.hidden));
        if !tiled {
            return self.gemm.linear(w, p, norm, self.rms.ptr);
        }
        let squares = if makes_rows {
            Squares { inputs: 0, results: self.squares.ptr }
        } else {
            Squares { inputs: self.squares.ptr, results: 0 }
        };
        let first = || WIDE.into_iter().find(|way| way.fits(w)).unwrap_or(Wide::N128T64);
        self.gemm.wide(w, p, norm, squares, way.unwrap_or_else(first))
    }

    /// Finds out the fastest way of every product over `rows` rows; all give the same bits.
    fn tune(&mut self, rows: usize) -> Result<(), GpuError> {
        let timer = Timer::new(&self.device)?;
        for which in PRODUCTS {
            if which == Product::Head && rows > WIDTHS[WIDTHS.len() - 1] {
                continue;
            }
            let (n, k) = (self.weights(which, 0).n, self.weights(which, 0).cin);
            let shape = Shape { m: rows, n, k, gelu: false };
            let way = WAYS.of(&self.device, self.gemm.elt, shape, || self.fastest(which, rows, &timer))?;
            self.ways.insert((rows, which), way);
        }
        Ok(())
    }

    fn fastest(&self, which: Product, rows: usize, timer: &Timer) -> Result<Wide, GpuError> {
        let mut best: Option<(f64, Wide)> = None;
        for way in WIDE.into_iter().filter(|way| way.fits(self.weights(which, 0))) {
            // All layers in turn, so that weights come from where they do in a round.
            let all = || (0..self.layers.len()).try_for_each(|n| self.product_by(which, n, rows, Some(way)));
            all()?;
            let mut least = f64::INFINITY;
            for _ in 0..3 {
                timer.mark(0)?;
                all()?;
                timer.mark(1)?;
                least = least.min(timer.seconds()?);
            }
            if best.is_none_or(|(seconds, _)| least < seconds) {
                best = Some((least, way));
            }
        }
        best.map(|(_, way)| way).ok_or_else(|| GpuError::Model("no way of a wide product fits its weights".into()))
    }

    fn round(&self, width: usize) -> Result<(), GpuError> {
        self.network(width, false)?;
        self.product(Product::Head, 0, width)?;
        let scores = self.config.speech_rows();
        let counts = self.rows.dev.ptr + 4 * WIDTHS[WIDTHS.len() - 1] as u64;
        let shared = (scores * 4) as u32;
        start!(self.device, self.sample, (width as u32, 1, 1), 1024, shared;
            self.args, self.draw, self.logits.ptr, scores as i32, self.head.n as i32, self.results.dev.ptr, counts, ROUNDS as i32)
    }

    /// Times the ways of wide products and records the rounds of every width.
    pub(super) fn warm_up(&mut self, most: usize) -> Result<(), GpuError> {
        if self.tiled(PASS) {
            for rows in BUCKETS {
                self.tune(rows)?;
            }
        }
        for width in WIDTHS.into_iter().filter(|&w| w < most * 2) {
            self.blank();
            self.rows.send(self.rows.dev.bytes)?;
            self.round(width)?;
            self.device.sync()?;
            let graph = self.device.capture(|| self.round(width))?;
            self.graphs.insert(width, graph);
        }
        Ok(())
    }

    fn blank(&mut self) {
        let words = self.rows.as_mut::<i32>();
        let most = WIDTHS[WIDTHS.len() - 1];
        words[..most].fill(-1);
        words[most..].fill(0);
    }

    /// `rounds` rounds for `slots`, one result each.
    pub(super) fn decode(&mut self, slots: &[usize], rounds: usize) -> Result<Vec<Drawn>, GpuError> {
        let rounds = rounds.min(ROUNDS);
        let Some(width) = WIDTHS.into_iter().find(|&w| w >= slots.len()) else {
            return Err(GpuError::Model(format!("{} rows are more than a decode step takes", slots.len())));
        };
        self.blank();
        for (row, &slot) in slots.iter().enumerate() {
            debug_assert!(slot < self.slots);
            self.rows.as_mut::<i32>()[row] = slot as i32;
        }
        self.rows.send(self.rows.dev.bytes)?;
        for _ in 0..rounds {
            match self.graphs.get(&width).filter(|_| !self.device.traced()) {
                Some(graph) => graph.launch()?,
                None => self.round(width)?,
            }
        }
        self.results.fetch(slots.len() * ROUNDS * 4)?;
        self.device.sync()?;
        let results = self.results.as_mut::<i32>();
        Ok((0..slots.len())
            .map(|row| {
                let mut drawn = Drawn::default();
                for &t in &results[row * ROUNDS..][..rounds] {
                    match t {
                        -1 => {}
                        -2 => drawn.bad = true,
                        -3 => drawn.eos = true,
                        id => drawn.tokens.push(id as u32),
                    }
                }
                drawn
            })
            .collect())
    }

    /// The scores of the last round: row `row`.
    pub(super) fn scores(&self, row: usize) -> Result<Vec<f32>, GpuError> {
        let mut out = vec![0f32; self.config.speech_rows()];
        self.device.read(self.logits.ptr + (row * self.head.n * 4) as u64, &mut out)?;
        Ok(out)
    }
}

/// The macros of llm.cu.
pub(super) fn defines(config: &LlmConfig) -> Vec<(&'static str, i64)> {
    let group = config.heads / config.kv_heads;
    vec![("HD", config.head_dim as i64), ("GROUP", group as i64), ("KVH", config.kv_heads as i64)]
}

/// Dynamic shared memory of attention in 16 bit over heads of `hd` values.
fn attend_shared(tiles: usize, hd: usize) -> u32 {
    (ATTEND_WARPS * tiles * 16 * hd * 2) as u32
}

/// Whether attention runs where `group` query heads of `hd` values share a key head: as llm.cu is laid out.
fn attends(hd: usize, group: usize, elt: Elt) -> bool {
    // A head is cut into pieces of eight values, which lanes share.
    let pieces = hd.is_multiple_of(8) && (hd / 8).is_power_of_two();
    pieces
        && group <= 16
        && match elt {
            // Queries, each warp's sums, maxima and results, one key and value: all in the static 48 KiB. Positions
            // have a thread a value.
            Elt::F32 => hd <= 256 && 4 * (group * hd + ATTEND_WARPS * group * (hd + 2) + 2 * hd) <= 48 << 10,
            // Fragments are 16 values wide.
            Elt::Bf16 | Elt::F16 => hd.is_multiple_of(16) && attend_shared(DEEP_TILES, hd) <= ATTEND_SHARED,
        }
}

/// `[positions][dim / 2]` pairs of cosine and sine, angles in single precision as the reference computes them.
fn rope_table(positions: usize, dim: usize, theta: f64) -> Vec<[f32; 2]> {
    let frequencies: Vec<f32> = (0..dim / 2).map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / dim as f32)).collect();
    (0..positions)
        .flat_map(|p| frequencies.iter().map(move |f| p as f32 * f).map(|a| [a.cos(), a.sin()]).collect::<Vec<_>>())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_attention_has_no_room_for_are_refused() {
        for elt in [Elt::Bf16, Elt::F16] {
            for (hd, runs) in [(8, false), (16, true), (24, false), (32, true), (64, true), (128, false), (256, false)]
            {
                assert_eq!(attends(hd, 7, elt), runs, "{elt:?} {hd}");
            }
        }
        for (hd, group, runs) in [(8, 7, true), (64, 16, true), (128, 7, true), (128, 16, false), (256, 7, false)] {
            assert_eq!(attends(hd, group, Elt::F32), runs, "{group} of {hd}");
        }
        assert!(!attends(64, 17, Elt::Bf16) && !attends(512, 1, Elt::F32));
    }
}
