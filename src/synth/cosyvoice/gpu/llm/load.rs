//! Loading the language model: its layers in the layouts of the kernels, room for every slot, and scratch.

use std::collections::BTreeMap;

use super::super::device::{Elt, GpuError, Staging};
use super::super::gemm::{Gemm, PARTS, WHOLE_PARTS};
use super::super::units;
use super::super::weights::{Packed, Packer, Piece, Source};
use super::network::{Args, DEEP_TILES, Kernels, LEAN_TILES, Layer, Network, Scratch, TILES, attend_shared};
use super::{
    ATTEND_WARPS, ENDS, Llm, PASS, RECENT, ROUNDS, SAMPLED, SEQS, Sampler, Seq, WIDTHS, defines, sample_shared,
};
use crate::synth::cosyvoice::checkpoint::Part;
use crate::synth::cosyvoice::config::LlmConfig;

/// Dynamic shared memory that attention may take.
const ATTEND_SHARED: u32 = 200 << 10;
/// What it has besides, at most: queries over heads of 64 values, and every warp's maxima and sums.
const ATTEND_STATIC: u32 = 4 << 10;
const BODY: &str = "llm.model.model";

/// Whether the kernels run a model of these sizes where a block has `shared` bytes.
pub(in super::super) fn check(config: &LlmConfig, elt: Elt, shared: u32) -> Result<(), GpuError> {
    let (hidden, hd) = (config.hidden, config.head_dim);
    let (queries, keys, inner) = (config.heads * hd, config.kv_heads * hd, config.intermediate);
    if hidden % 32 != 0 || inner % 32 != 0 || queries % 32 != 0 || keys % 16 != 0 {
        return Err(GpuError::Model(format!("the language model's sizes do not fit the kernels: {config:?}")));
    }
    let group = config.heads / config.kv_heads;
    if !attends(hd, group, elt) || elt != Elt::F32 && attend_shared(TILES, hd) + ATTEND_STATIC > shared {
        return Err(GpuError::Model(format!("attention has no room for {group} heads of {hd} a key head in {elt:?}")));
    }
    if config.speech_rows() > SAMPLED {
        return Err(GpuError::Model(format!("more than {SAMPLED} speech ids cannot be sampled from on the GPU")));
    }
    if config.sampling.top_k > 64 || config.sampling.window > RECENT {
        return Err(GpuError::Model("top_k above 64 or a window above 16 cannot be sampled from on the GPU".into()));
    }
    Ok(())
}

/// Layer `n`.
fn layer(packer: &Packer, source: &dyn Source, config: &LlmConfig, n: usize) -> Result<Layer, GpuError> {
    let (hidden, hd) = (config.hidden, config.head_dim);
    let (queries, keys, inner) = (config.heads * hd, config.kv_heads * hd, config.intermediate);
    let floats = |key: &str, shape: &[usize]| source.floats(Part::Llm, key, shape);
    let name = |part: &str| format!("{BODY}.layers.{n}.{part}");
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
    Ok(Layer {
        qkv: called("qkv", qkv)?,
        out: called("out", out)?,
        gate_up: called("gate-up", gate_up)?,
        down: called("down", down)?,
    })
}

impl Llm {
    /// Loads the model with room for `slots` sequences of `positions` each.
    pub(in super::super) fn load(
        packer: &Packer,
        source: &dyn Source,
        config: &LlmConfig,
        slots: usize,
        positions: usize,
    ) -> Result<Self, GpuError> {
        let (device, elt, size) = (&packer.device, packer.elt, packer.elt.size());
        check(config, elt, device.shared)?;
        let (hidden, hd) = (config.hidden, config.head_dim);
        let (queries, keys, inner) = (config.heads * hd, config.kv_heads * hd, config.intermediate);
        let floats = |key: &str, shape: &[usize]| source.floats(Part::Llm, key, shape);
        let layers = (0..config.layers).map(|n| layer(packer, source, config, n)).collect::<Result<Vec<_>, _>>()?;
        let norm = floats(&format!("{BODY}.norm.weight"), &[hidden])?;
        let speech_rows = config.speech_rows();
        let head_values = floats("llm_decoder.weight", &[speech_rows, hidden])?;
        let head_piece = [Piece { values: &head_values, n: speech_rows, mul: 1, off: 0 }];
        let head = packer.pack(&head_piece, speech_rows, hidden, 1, None, Some(&norm))?;
        let head = packer.tiled(Packed { name: "head", ..head })?;
        let text = packer.elements(&floats(&format!("{BODY}.embed_tokens.weight"), &[config.vocab, hidden])?)?;
        let speech = packer.elements(&floats("speech_embedding.weight", &[speech_rows, hidden])?)?;
        let rope = device.upload("rotary angles", &rope_table(positions, hd, config.rope_theta))?;

        let module = device.compile(&units::LLM, elt, &defines(config))?;
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
        let prefix = Staging::new(device, "prefixes", 4 * SEQS + slots * size_of::<Seq>())?;
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
        // Whether so many blocks of attention with room for so many tiles run on a multiprocessor.
        let fitting = |blocks: u32, tiles: usize| {
            elt != Elt::F32 && blocks * (attend_shared(tiles, hd) + ATTEND_STATIC) <= device.shared
        };
        let kernels = Kernels {
            embed: module.kernel("llm_embed", 0)?,
            append: module.kernel("llm_append", 0)?,
            last: module.kernel("llm_last", 0)?,
            attend: module.kernel("llm_attend", ATTEND_SHARED)?,
            attend_three: fitting(3, TILES).then(|| module.kernel("llm_attend_three", ATTEND_SHARED)).transpose()?,
            attend_four: (fitting(4, LEAN_TILES) && config.heads / config.kv_heads <= 8)
                .then(|| module.kernel("llm_attend_four", ATTEND_SHARED))
                .transpose()?,
            attend_deep: fitting(1, DEEP_TILES).then(|| module.kernel("llm_attend_deep", ATTEND_SHARED)).transpose()?,
            attend_prefix: module.kernel("llm_attend_prefix", ATTEND_SHARED)?,
            sample: module.kernel("llm_sample", sample_shared(speech_rows).max(49 << 10))?,
        };
        let scratch = Scratch {
            qkv: device.zeros("activations", PASS * (queries + 2 * keys) * 4)?,
            heard: device.zeros("activations", PASS * queries * size)?,
            inner: device.zeros("activations", PASS * inner * size)?,
            logits: device.zeros("scores", WIDTHS[WIDTHS.len() - 1] * head.n * 4)?,
            rms: device.zeros("activations", PASS * 4)?,
            squares: device.zeros("activations", PARTS * PASS * 4)?,
            last: (
                device.zeros("activations", ENDS * hidden * 4)?,
                device.zeros("activations", ENDS * (queries + 2 * keys) * 4)?,
            ),
        };
        let network = Network {
            device: device.clone(),
            config: config.clone(),
            gemm: Gemm::with_warpgroup(device, elt)?,
            tileable: hidden % 64 == 0 && inner % 64 == 0 && queries % 64 == 0 && hidden <= WHOLE_PARTS,
            tiles: BTreeMap::new(),
            layers,
            head,
            args,
            kernels,
            scratch,
        };
        Ok(Self {
            device: device.clone(),
            network,
            sampler: Sampler::new(config),
            results: Staging::new(device, "results", 4 * ROUNDS * WIDTHS[WIDTHS.len() - 1])?,
            rows,
            prefix,
            graphs: BTreeMap::new(),
            passes: BTreeMap::new(),
            slots,
            owned: vec![text, speech, rope, cache, seq, forced, x, xe, row_slot, row_pos],
        })
    }
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
