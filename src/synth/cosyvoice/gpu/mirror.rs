//! Structs that kernels take as they lie in memory. Each is declared twice, in Rust and in CUDA, and both compilers check
//! that the declarations agree.
//!
//! In Rust, [`mirrored`] refuses a struct with padding, whose bytes the host may not read as words, and a list that
//! leaves a field out. [`checks`] writes the sizes and the order that Rust has as assertions at the end of the CUDA source.

use std::fmt::Write;

/// How a struct lies in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Its name in the CUDA source.
    pub(super) name: &'static str,
    pub(super) size: usize,
    /// Name and size of every field in order, without gaps; the names are the same on both sides.
    pub(super) fields: &'static [(&'static str, usize)],
}

/// Assertions for the end of a CUDA source in which the structs are declared: sizes and order of all fields, and that they
/// are all there is. So each one's offset is what it is in Rust. (The run-time compiler has no `offsetof`.)
pub(super) fn checks(layouts: &[Layout]) -> String {
    let mut text = String::new();
    for Layout { name, size, fields } in layouts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "static_assert(sizeof({name}) == {size}, \"{name} has another size in Rust\");");
        for (field, size) in *fields {
            let _ = writeln!(
                text,
                "static_assert(sizeof({name}::{field}) == {size}, \"{name}::{field} has another size in Rust\");"
            );
        }
        let below = |pair: &[(&str, usize)]| format!("(const void*)&v.{} < (const void*)&v.{}", pair[0].0, pair[1].0);
        let ordered: Vec<String> = fields.windows(2).map(below).chain(["true".to_owned()]).collect();
        let _ = writeln!(
            text,
            "__device__ constexpr bool {name}_in_order(const {name}& v) {{ return {}; }}\n\
             static_assert({name}_in_order({name}{{}}), \"{name} has another order in Rust\");",
            ordered.join(" && ")
        );
    }
    text
}

/// Bytes of the field that `of` picks.
pub(super) const fn field_size<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Says that a `repr(C)` struct mirrors one of the CUDA source: `mirrored!(Rust as "Cuda" { every, field });` gives it
/// `LAYOUT`.
macro_rules! mirrored {
    ($rust:ident as $cuda:literal { $($field:ident),+ $(,)? }) => {
        impl $rust {
            pub(super) const LAYOUT: $crate::synth::cosyvoice::gpu::mirror::Layout =
                $crate::synth::cosyvoice::gpu::mirror::Layout {
                    name: $cuda,
                    size: size_of::<$rust>(),
                    fields: &[$((
                        stringify!($field),
                        $crate::synth::cosyvoice::gpu::mirror::field_size(|all: &$rust| &all.$field),
                    )),+],
                };
        }

        const _: () = {
            let _ = |all: &$rust| {
                // Does not compile while a field is missing from the list.
                let $rust { $($field: _),+ } = all;
            };
            let mut at = 0;
            $(
                assert!(at == std::mem::offset_of!($rust, $field), "padding, or fields listed out of order");
                at += $crate::synth::cosyvoice::gpu::mirror::field_size(|all: &$rust| &all.$field);
            )+
            assert!(at == size_of::<$rust>(), "padding at the end");
        };
    };
}
pub(super) use mirrored;

#[cfg(test)]
mod tests {
    use super::super::compiler::{Source, Unit};
    use super::super::{Elt, libraries};
    use super::*;

    #[repr(C)]
    struct Pair {
        first: u64,
        second: [i32; 2],
    }
    mirrored!(Pair as "Pair" { first, second });

    #[test]
    fn assertions_name_every_field_with_its_size_and_place() {
        let text = checks(&[Pair::LAYOUT]);
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(text.contains("sizeof(Pair) == 16") && text.contains("sizeof(Pair::second) == 8"), "{text}");
        assert!(text.contains("&v.first < (const void*)&v.second"), "{text}");
    }

    #[test]
    fn a_struct_that_differs_in_cuda_does_not_compile() {
        if !libraries::open_compiler() {
            return;
        }
        let compile = |text: &'static [&'static str]| {
            let source = Source { name: "pair.cu", parts: text, checks: || checks(&[Pair::LAYOUT]) };
            Unit { source: &source, elt: Elt::F32, defines: &[] }.check("sm_80")
        };
        compile(&["struct Pair { unsigned long long first; int second[2]; };"]).expect("the same");
        for other in [
            &["struct Pair { int second[2]; unsigned long long first; };"],
            &["struct Pair { unsigned long long first; int second[3]; };"],
            &["struct Pair { unsigned long long first; int second, third; };"],
        ] {
            let error = compile(other).expect_err("another layout").to_string();
            assert!(error.contains("in Rust"), "{error}");
        }
    }
}
