//! Loading the flow: its layers in the layouts of the kernels, what is folded beforehand, and scratch.

use std::collections::{BTreeMap, HashMap};

use super::super::device::{Buf, Device, Elt, GpuError, Module, Staging};
use super::super::gemm::Gemm;
use super::super::lt::Lt;
use super::super::slabs::PARTS;
use super::super::units;
use super::super::weights::{Packer, Source, padded};
use super::attend::{self, Attention, QUERIES};
use super::fp8::{self, Fp8};
use super::linear::{Linear, Linears, PARTS as SHARES, SKINNY_ROWS, narrow_kernels};
use super::position::{NARROW_TILE, Positions, TILE};
use super::unguided::Unguided;
use super::{
    BACK, Block, ChunkArgs, Flow, Front, Kernels, MOST_SHARED, ROOM, Scratch, Staged, Weights, defines, head_bytes,
};
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::{CONV_POS_GROUPS, CONV_POS_KERNEL, Config, FlowConfig, TIME_EMBED};
use crate::synth::cosyvoice::fp8::{Modulated, Ranges};
use crate::synth::cosyvoice::noise;

pub(super) const ROOT: &str = "decoder.estimator";

/// Whether the kernels run a flow of these sizes where a block has `shared` bytes; `int8`: with keys and values in 8 bits.
pub(in super::super) fn check(config: &Config, shared: u32, int8: bool) -> Result<(), GpuError> {
    let f = &config.flow;
    let dim = f.dim;
    let (outputs, positions) = TILE.shape();
    let inner = f.inner();
    let fits = f.head_dim.is_multiple_of(16)
        && (f.head_dim / 8).is_power_of_two()
        && attend::fits(f.head_dim, shared, int8)
        && f.head_dim <= 128
        && f.block <= positions.min(QUERIES)
        && dim.is_multiple_of(64)
        && dim / CONV_POS_GROUPS <= outputs
        && f.input == f.mel
        && f.lookahead_channels.is_multiple_of(4)
        && f.input.is_multiple_of(4)
        && inner.is_multiple_of(32)
        && f.block.is_multiple_of(config.token_mel_ratio);
    if !fits {
        return Err(GpuError::Model(format!("the flow's sizes do not fit the kernels: {f:?}")));
    }
    Ok(())
}

/// A layer's weight `[n, k]` and bias.
fn pair(source: &dyn Source, name: &str, n: usize, k: usize) -> Result<(Vec<f32>, Vec<f32>), GpuError> {
    let get = |key: String, shape: &[usize]| source.floats(Part::Flow, &key, shape);
    Ok((get(format!("{name}.weight"), &[n, k])?, get(format!("{name}.bias"), &[n])?))
}

/// Layers over the same inputs, as one: by name and outputs.
type Layers = (Vec<f32>, Vec<f32>);

fn layers(source: &dyn Source, parts: &[(String, usize)], k: usize) -> Result<Layers, GpuError> {
    let outputs = parts.iter().map(|(_, n)| n).sum();
    let (mut w, mut b) = (Vec::with_capacity(outputs * k), Vec::with_capacity(outputs));
    for (name, n) in parts {
        let (wn, bn) = pair(source, name, *n, k)?;
        w.extend_from_slice(&wn);
        b.extend_from_slice(&bn);
    }
    Ok((w, b))
}

/// The GEMM of layers over `k` inputs; `fp8`: what no input is larger than, and no result that is to have 8 bits.
fn linear(packer: &Packer, (w, b): &Layers, k: usize, fp8: Option<(f32, Option<f32>)>) -> Result<Linear, GpuError> {
    let n = b.len();
    Ok(Linear {
        packed: packer.whole(w, n, k, 1, Some(b))?,
        plain: if packer.elt == Elt::F32 { None } else { Some((packer.elements(w)?, packer.elements(b)?)) },
        fp8: fp8.map(|(range, results)| Fp8::new(packer, w, b, range, results)).transpose()?,
        n,
        k,
    })
}

/// Transformer block `n`; `modulated`: what comes before attention and before its feed-forward layers, where their products have
/// 8 bits.
fn block(
    packer: &Packer,
    source: &dyn Source,
    f: &FlowConfig,
    n: usize,
    modulated: Option<[Modulated; 2]>,
) -> Result<Block, GpuError> {
    let (dim, inner, ff) = (f.dim, f.inner(), f.ff());
    let name = |part: &str| format!("{ROOT}.transformer_blocks.{n}.{part}");
    let read = |parts: &[(String, usize)], k: usize| layers(source, parts, k);
    let qkv = read(&[(name("attn.to_q"), inner), (name("attn.to_k"), inner), (name("attn.to_v"), inner)], dim)?;
    let (out, up) = (read(&[(name("attn.to_out.0"), dim)], inner)?, read(&[(name("ff.ff.0.0"), ff)], dim)?);
    let down = read(&[(name("ff.ff.2"), dim)], ff)?;
    let ranges = modulated.map(|[attention, feed]| {
        Ranges::of(&attention, &feed, (&qkv.0[2 * inner * dim..], &qkv.1[2 * inner..]), (&up.0, &up.1))
    });
    let range = |of: fn(&Ranges) -> (f32, Option<f32>)| ranges.as_ref().map(of);
    Ok(Block {
        qkv: linear(packer, &qkv, dim, range(|r| (r.qkv, None)))?,
        out: linear(packer, &out, inner, range(|r| (r.out, None)))?,
        up: linear(packer, &up, dim, range(|r| (r.up, Some(r.down))))?,
        down: linear(packer, &down, ff, range(|r| (r.down, None)))?,
    })
}

/// What comes before attention and before the feed-forward layers of block `n`, by the steps' rows of `modulation`.
fn modulated(modulation: &[f32], f: &FlowConfig, n: usize) -> [Modulated; 2] {
    let row = |step: &[f32], row: usize| step[(6 * n + row) * f.dim..][..f.dim].to_vec();
    [0, 3].map(|shift| {
        let steps = modulation.chunks_exact((6 * f.depth + 2) * f.dim);
        Modulated::of(steps.map(|step| (row(step, shift + 1).iter().map(|v| 1.0 + v).collect(), row(step, shift))))
    })
}

fn weights(packer: &Packer, source: &dyn Source, config: &Config) -> Result<Weights, GpuError> {
    let (f, device) = (&config.flow, &packer.device);
    let dim = f.dim;
    let get = |key: &str, shape: &[usize]| source.floats(Part::Flow, key, shape);
    let (visited, deltas): (Vec<f32>, Vec<f32>) = f.evaluations().into_iter().unzip();
    let modulation = modulation(packer, source, f, &visited)?;
    let mut steps = Vec::new();
    if device.modes.products.fp8() {
        steps.resize(modulation.bytes / 4, 0f32);
        device.read(modulation.ptr, &mut steps)?;
    }
    let modulated = |n| (!steps.is_empty()).then(|| modulated(&steps, f, n));
    let blocks = (0..f.depth).map(|n| block(packer, source, f, n, modulated(n))).collect::<Result<Vec<_>, _>>()?;
    let (w, b) = pair(source, &format!("{ROOT}.input_embed.proj"), dim, f.dit_in())?;
    let input = packer.whole(&w, dim, f.dit_in(), 1, Some(&b))?;
    let (w, b) = pair(source, &format!("{ROOT}.proj_out"), f.mel, dim)?;
    let out = packer.whole(&w, f.mel, dim, 1, Some(&b))?;

    let noise_frames = config.noise_frames();
    let rope = rope_table(&get(&format!("{ROOT}.rotary_embed.inv_freq"), &[f.head_dim / 2])?, noise_frames + f.block);
    Ok(Weights {
        input,
        blocks,
        out,
        modulation,
        deltas: device.upload("times", &deltas)?,
        rope: device.upload("rotary angles", &rope)?,
    })
}

fn front(packer: &Packer, source: &dyn Source, config: &Config) -> Result<Front, GpuError> {
    let (f, device) = (&config.flow, &packer.device);
    let get = |key: &str, shape: &[usize]| source.floats(Part::Flow, key, shape);
    let noise_frames = config.noise_frames();
    let table = noise::flow_table(config);
    // Frames after the table's end are only ever padding of a last block.
    let mut by_frame = vec![0f32; (noise_frames + f.block) * f.mel];
    for (channel, row) in table.chunks_exact(noise_frames).enumerate() {
        for (frame, v) in row.iter().enumerate() {
            by_frame[frame * f.mel + channel] = *v;
        }
    }
    let (look, ch) = (f.lookahead, f.lookahead_channels);
    let w = get("pre_lookahead_layer.conv1.weight", &[ch, f.input, look + 1])?;
    let mut ahead = vec![0f32; w.len()];
    for (i, v) in w.iter().enumerate() {
        let (o, c, tap) = (i / (f.input * (look + 1)), i / (look + 1) % f.input, i % (look + 1));
        ahead[(tap * f.input + c) * ch + o] = *v;
    }
    let w = get("pre_lookahead_layer.conv2.weight", &[f.input, ch, BACK])?;
    let mut back = vec![0f32; w.len()];
    for (i, v) in w.iter().enumerate() {
        let (o, c, tap) = (i / (ch * BACK), i / BACK % ch, i % BACK);
        back[(o * BACK + tap) * ch + c] = *v;
    }
    let speaker = (
        get("spk_embed_affine_layer.weight", &[f.spk_dim, f.speaker])?,
        get("spk_embed_affine_layer.bias", &[f.spk_dim])?,
    );
    Ok(Front {
        noise: device.upload("noise", &by_frame)?,
        noise_frames,
        table: device.upload("tokens", &get("input_embedding.weight", &[f.vocab, f.input])?)?,
        ahead: [
            device.upload("weights", &ahead)?,
            device.upload("weights", &get("pre_lookahead_layer.conv1.bias", &[ch])?)?,
        ],
        back: [
            device.upload("weights", &back)?,
            device.upload("weights", &get("pre_lookahead_layer.conv2.bias", &[f.input])?)?,
        ],
        speaker,
    })
}

fn kernels(device: &Device, module: &Module, elt: Elt, f: &FlowConfig) -> Result<Kernels, GpuError> {
    Ok(Kernels {
        hidden: module.kernel("flow_hidden", MOST_SHARED)?,
        start: module.kernel("flow_start", MOST_SHARED)?,
        input: module.kernel("flow_input", 0)?,
        norm: module.kernel("flow_norm", 0)?,
        euler: module.kernel("flow_euler", 0)?,
        attention: Attention::load(device, module, elt, f)?,
        norm_shares: module.kernel("flow_norm_shares", 0)?,
        norm_fp8: device.modes.products.fp8().then(|| module.kernel("flow_norm_fp8", 0)).transpose()?,
        append: module.kernel("flow_append", 0)?,
        neighbours: module.kernel("flow_neighbours", 0)?,
        keep: module.kernel("flow_keep", 0)?,
    })
}

fn scratch(packer: &Packer, config: &Config) -> Result<Scratch, GpuError> {
    let (f, device, size) = (&config.flow, &packer.device, packer.elt.size());
    let (dim, inner, ff, ch) = (f.dim, f.inner(), f.ff(), f.lookahead_channels);
    let rows = ROOM * 2 * f.block;
    let act = |width: usize, bytes: usize| device.zeros("activations", rows * width * bytes);
    let tiles = |positions: usize| -> Vec<[i32; 4]> {
        let of = |r: usize, first: usize| [r as i32, first as i32, (r * f.block) as i32, f.block as i32];
        let row = |r| (0..f.block).step_by(positions).map(move |first| of(r, first));
        (0..ROOM * 2).flat_map(row).collect()
    };
    Ok(Scratch {
        input: act(padded(f.dit_in()), size)?,
        hist: device.zeros("activations", ROOM * 2 * 8)?,
        tiles: device.upload("tiles", &tiles(TILE.shape().1))?,
        narrow_tiles: device.upload("tiles", &tiles(NARROW_TILE.shape().1))?,
        h0: act(dim, 4)?,
        h0e: act(dim, size)?,
        c1: act(dim, size)?,
        h: act(dim, 4)?,
        a: act(dim.max(inner), size)?,
        qkv: act(3 * inner, size)?,
        heard: act(dim.max(inner), size)?,
        ff: act(ff, size)?,
        v: act(padded(f.mel), 4)?,
        hidden: device.zeros("activations", ROOM * (f.block / config.token_mel_ratio + 2) * ch * 4)?,
    })
}

impl Flow {
    pub(in super::super) fn load(packer: &Packer, source: &dyn Source, config: &Config) -> Result<Self, GpuError> {
        let device = &packer.device;
        let (f, elt) = (&config.flow, packer.elt);
        check(config, device.shared, device.modes.int8_keys)?;
        let modes = device.modes;
        let module = device.compile(&units::FLOW, elt, &defines(f, modes.int8_keys, modes.products.fp8()))?;
        let skinny = match elt {
            Elt::F32 => Vec::new(),
            _ => ["flow_skinny_16", "flow_skinny_32", "flow_skinny_48"]
                .into_iter()
                .map(|name| module.kernel(name, MOST_SHARED))
                .collect::<Result<_, _>>()?,
        };
        let narrow = narrow_kernels(device, &module, elt, f.block)?;
        let parts = usize::from(!narrow.is_empty());
        let x_offset = f.steps * f.depth * 4 * f.heads * head_bytes(f, elt, device.modes.int8_keys);
        let hist_bytes = f.steps * 2 * 2 * (CONV_POS_KERNEL - 1) * f.dim * elt.size();
        let per_row = f.block / config.token_mel_ratio + 2 + f.lookahead;
        let chunk_bytes = ROOM * 2 * size_of::<ChunkArgs>();
        let tokens_bytes = f.steps * ROOM * (per_row + size_of::<ChunkArgs>()) * 4;
        let front = front(packer, source, config)?;
        let most = front.limit(f) / f.block;
        let unguided = Unguided::new(device, f, most, x_offset / f.steps, hist_bytes / (2 * f.steps))?;
        Ok(Self {
            device: device.clone(),
            config: f.clone(),
            ratio: config.token_mel_ratio,
            linears: Linears {
                device: device.clone(),
                gemm: Gemm::new(device, elt)?,
                lt: if elt == Elt::F32 { None } else { Some(Lt::new(device, elt)?) },
                choices: HashMap::new(),
                skinny,
                narrow,
                block: f.block,
                parts: device.zeros("activations", parts * SHARES * SKINNY_ROWS * f.dim * 4)?,
                fp8_rows: fp8::least_rows(device.modes.products),
            },
            kernels: kernels(device, &module, elt, f)?,
            positions: Positions::load(packer, source, f, &module)?,
            weights: weights(packer, source, config)?,
            front,
            scratch: scratch(packer, config)?,
            staged: Staged {
                chunks: Staging::new(device, "chunks", f.steps * chunk_bytes)?,
                tokens: Staging::new(device, "chunk tokens", tokens_bytes)?,
                bad: Staging::new(device, "flags", ROOM * 4)?,
                spare_hist: device.zeros("histories", hist_bytes)?,
            },
            unguided,
            graphs: BTreeMap::new(),
            slab_bytes: x_offset + PARTS * 2 * f.block * f.mel * 4,
            x_offset,
            hist_bytes,
        })
    }
}

/// `[positions][pairs]` cosines and sines.
fn rope_table(frequencies: &[f32], positions: usize) -> Vec<[f32; 2]> {
    (0..positions)
        .flat_map(|p| frequencies.iter().map(move |f| p as f32 * f).map(|a| [a.cos(), a.sin()]).collect::<Vec<_>>())
        .collect()
}

/// `[step][6 * depth + 2][dim]`: what every modulation layer gives at each time, folded once.
fn modulation(packer: &Packer, source: &dyn Source, f: &FlowConfig, times: &[f32]) -> Result<Buf, GpuError> {
    let device = &packer.device;
    let (dim, half) = (f.dim, TIME_EMBED / 2);
    let rate = 10_000f64.ln() / (half - 1) as f64;
    let mut waves = Vec::with_capacity(times.len() * TIME_EMBED);
    for &t in times {
        let angles: Vec<f32> = (0..half).map(|i| 1000.0 * t * (-(i as f64) * rate).exp() as f32).collect();
        waves.extend(angles.iter().map(|a| a.sin()));
        waves.extend(angles.iter().map(|a| a.cos()));
    }
    let get = |key: &str, shape: &[usize]| source.floats(Part::Flow, &format!("{ROOT}.{key}"), shape);
    let silu = |v: &mut f32| *v /= 1.0 + (-*v).exp();
    let layer = |x: &[f32], name: &str, n: usize, k: usize| -> Result<Vec<f32>, GpuError> {
        let (x, y) = (device.upload("times", x)?, device.zeros("times", times.len() * n * 4)?);
        let (w, b) = (get(&format!("{name}.weight"), &[n, k])?, get(&format!("{name}.bias"), &[n])?);
        packer.linear(&x, times.len(), &w, &b, k, y.ptr, n)?;
        let mut out = vec![0f32; times.len() * n];
        device.read(y.ptr, &mut out)?;
        Ok(out)
    };
    let mut hidden = layer(&waves, "time_embed.time_mlp.0", dim, TIME_EMBED)?;
    hidden.iter_mut().for_each(silu);
    let mut active = layer(&hidden, "time_embed.time_mlp.2", dim, dim)?;
    active.iter_mut().for_each(silu);
    let active = device.upload("times", &active)?;
    let stride = dim * (6 * f.depth + 2);
    let out = device.zeros("modulation", times.len() * stride * 4)?;
    for n in 0..=f.depth {
        let (name, parts) = if n < f.depth {
            (format!("transformer_blocks.{n}.attn_norm.linear"), 6)
        } else {
            ("norm_out.linear".into(), 2)
        };
        let (w, b) =
            (get(&format!("{name}.weight"), &[parts * dim, dim])?, get(&format!("{name}.bias"), &[parts * dim])?);
        packer.linear(&active, times.len(), &w, &b, dim, out.ptr + (n * 6 * dim * 4) as u64, stride)?;
    }
    Ok(out)
}
