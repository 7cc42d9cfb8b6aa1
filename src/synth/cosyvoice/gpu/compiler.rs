//! The run-time compiler: source to code for one architecture, kept on disk between starts.
//!
//! # Why
//! Compiling takes ten seconds of a start. What is kept is named by everything that it depends on: the source with its
//! macros, the architecture and the compiler's version. The driver is not among them: machine code does not depend on it,
//! and code that it finishes it finishes at every load. A file is written under another name and then renamed, so that a reader finds all of it or nothing.
//! Whatever is wrong with the folder only costs the time again.

use std::ffi::CString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::result as rtc;
use cudarc::nvrtc::sys;
use sha2::{Digest, Sha256};

use super::device::{Elt, GpuError};
use super::target::Target;
use crate::file::{create, replace};

/// A CUDA source.
pub(super) struct Source {
    pub(super) name: &'static str,
    /// One after another.
    pub(super) parts: &'static [&'static str],
    /// What is to follow them: assertions on the structs that Rust declares too ([`super::mirror`]).
    pub(super) checks: fn() -> String,
}

impl Source {
    fn text(&self) -> String {
        [self.parts.join("\n"), (self.checks)()].join("\n")
    }
}

/// One source to be compiled.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    pub(super) source: &'a Source,
    pub(super) elt: Elt,
    pub(super) defines: &'a [(&'a str, i64)],
}

/// Version of the run-time compiler, such as `13.0`.
pub(super) fn version() -> String {
    let (major, minor) = numbers();
    format!("{major}.{minor}")
}

fn numbers() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are alive; the library is open, as every caller has made sure.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

/// Architectures that the compiler knows, such as 90; none where it does not say.
pub(super) fn supported() -> Vec<u32> {
    let mut count = 0;
    // SAFETY: as above.
    if unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) } != sys::nvrtcResult::NVRTC_SUCCESS {
        return Vec::new();
    }
    let mut list = vec![0i32; count.max(0) as usize];
    // SAFETY: `list` has as many places as the compiler just said.
    let code = unsafe { sys::nvrtcGetSupportedArchs(list.as_mut_ptr()) };
    if code == sys::nvrtcResult::NVRTC_SUCCESS { list.into_iter().map(|n| n as u32).collect() } else { Vec::new() }
}

impl Unit<'_> {
    fn options(&self, arch: &str) -> Vec<String> {
        let mut options =
            vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), format!("-DELT={}", self.elt.define())];
        // Only what needs 64 bits gets them: index arithmetic is cheaper without.
        options.extend(
            self.defines
                .iter()
                .map(|(k, v)| if i32::try_from(*v).is_ok() { format!("-D{k}={v}") } else { format!("-D{k}={v}ll") }),
        );
        options
    }

    /// The code for `arch`, from `kept` if it is there.
    pub(super) fn code(&self, arch: &str, kept: Option<&Kept>) -> Result<Vec<u8>, GpuError> {
        let text = self.source.text();
        let options = self.options(arch);
        let name = || {
            let compiler = version();
            let parts = [compiler.as_str(), self.source.name, arch, &text].into_iter();
            named(self.source.name, parts.chain(options.iter().map(String::as_str)))
        };
        let Some((kept, name)) = kept.map(|kept| (kept, name())) else { return self.compile(&text, &options, arch) };
        if let Some(code) = kept.read(&name) {
            return Ok(code);
        }
        let code = self.compile(&text, &options, arch)?;
        kept.write(&name, &code);
        Ok(code)
    }

    /// Whether it compiles for `arch`. What it compiles to is thrown away: a compiler that can leave optimisation out does,
    /// which takes a fifth of the time.
    ///
    /// # Errors
    /// What does not compile.
    pub(super) fn check(&self, arch: &str) -> Result<(), GpuError> {
        let mut options = self.options(arch);
        if numbers() >= (13, 0) {
            options.push("--Ofast-compile=max".into());
        }
        self.compile(&self.source.text(), &options, arch).map(drop)
    }

    fn compile(&self, text: &str, options: &[String], arch: &str) -> Result<Vec<u8>, GpuError> {
        let failed = |log: String| GpuError::Compile { unit: self.source.name, log };
        let text = CString::new(text).map_err(|e| failed(e.to_string()))?;
        let name = CString::new(self.source.name).map_err(|e| failed(e.to_string()))?;
        let program = rtc::create_program(&text, Some(&name)).map_err(|e| failed(e.to_string()))?;
        // SAFETY: `program` was just created and is destroyed once, below, on every path.
        unsafe {
            let built = rtc::compile_program(program, options);
            let result = if built.is_err() {
                let log = rtc::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
                Err(failed(String::from_utf8_lossy(&log).into_owned()))
            } else {
                image(program, arch).map_err(|code| failed(format!("{code:?}")))
            };
            let _ = rtc::destroy_program(program);
            result
        }
    }
}

/// What a program was compiled to.
///
/// # Safety
/// `program` was compiled and is alive.
unsafe fn image(program: sys::nvrtcProgram, arch: &str) -> Result<Vec<u8>, sys::nvrtcResult> {
    let ok = |code| if code == sys::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(code) };
    let mut size = 0usize;
    // SAFETY: the caller's promise; the image has the size that the compiler names.
    unsafe {
        if Target::finished_by_driver(arch) {
            ok(sys::nvrtcGetPTXSize(program, &raw mut size))?;
            let mut image = vec![0u8; size];
            ok(sys::nvrtcGetPTX(program, image.as_mut_ptr().cast()))?;
            // Text, which the driver reads up to a zero.
            image.push(0);
            return Ok(image);
        }
        ok(sys::nvrtcGetCUBINSize(program, &raw mut size))?;
        let mut image = vec![0u8; size];
        ok(sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()))?;
        Ok(image)
    }
}

/// A file's name for what depends on all of `parts`.
pub(super) fn named<'a>(stem: &str, parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    format!("{stem}-{}", hex(&hash.finalize()[..16]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A folder of things that are expensive to find out again, each a file. Several processes may use it.
#[derive(Clone, Debug)]
pub(super) struct Kept(PathBuf);

impl Kept {
    pub(super) fn new(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// What was written under `name`; nothing where it is not whole.
    pub(super) fn read(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = std::fs::read(self.0.join(name)).ok()?;
        // A disk that was full or a power cut may leave a part: the hash at the end tells.
        let end = bytes.len().checked_sub(32)?;
        let whole = Sha256::digest(&bytes[..end]).as_slice() == &bytes[end..];
        bytes.truncate(end);
        whole.then_some(bytes)
    }

    /// Writes `bytes` under `name`, in one go for its readers; says in the log why it could not.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) {
        let done = std::fs::create_dir_all(&self.0).and_then(|()| replace(&self.0.join(name), &sealed(bytes)));
        if let Err(error) = done {
            self.not_kept(&error);
        }
    }

    /// Writes `bytes` under `name` unless something whole is there, and gives what is there then: whichever process was
    /// first decides for all of them.
    pub(super) fn first(&self, name: &str, bytes: Vec<u8>) -> Vec<u8> {
        let path = self.0.join(name);
        let done = std::fs::create_dir_all(&self.0).and_then(|()| create(&path, &sealed(&bytes)));
        match done {
            Ok(()) => bytes,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.read(name).unwrap_or_else(|| {
                // What is there is not whole, and helps no process.
                self.write(name, &bytes);
                bytes
            }),
            Err(error) => {
                self.not_kept(&error);
                bytes
            }
        }
    }

    fn not_kept(&self, error: &std::io::Error) {
        tracing::debug!(%error, folder = %self.0.display(), "compiled kernels and tile choices are not kept");
    }
}

/// `bytes` with the hash by which a reader knows that they are all there.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    [bytes, &Sha256::digest(bytes)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_whole_or_not_at_all() {
        let dir = tempfile::tempdir().expect("a folder");
        let kept = Kept::new(&dir.path().join("made/when/needed"));
        assert_eq!(kept.read("a"), None);
        kept.write("a", b"code");
        assert_eq!(kept.read("a").as_deref(), Some(&b"code"[..]));
        kept.write("a", b"newer code");
        assert_eq!(kept.read("a").as_deref(), Some(&b"newer code"[..]));
        let path = dir.path().join("made/when/needed/a");
        let bytes = std::fs::read(&path).expect("there");
        for cut in [0, 5, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..cut]).expect("written");
            assert_eq!(kept.read("a"), None, "{cut} bytes of it");
        }
        assert_eq!(std::fs::read_dir(path.parent().expect("a folder")).expect("there").count(), 1, "no part is left");
    }

    #[test]
    fn what_was_found_first_holds_for_every_process() {
        let dir = tempfile::tempdir().expect("a folder");
        // Two processes that started together on an empty folder, each with a finding of its own.
        let (one, other) = (Kept::new(&dir.path().join("kept")), Kept::new(&dir.path().join("kept")));
        assert_eq!((one.read("tile"), other.read("tile")), (None, None));
        assert_eq!(one.first("tile", b"64 x 128".to_vec()), b"64 x 128");
        assert_eq!(other.first("tile", b"128 x 64".to_vec()), b"64 x 128");
        assert_eq!(other.read("tile").as_deref(), Some(&b"64 x 128"[..]));
        // What is spoilt is found anew, and whole for the next.
        std::fs::write(dir.path().join("kept/tile"), b"64").expect("written");
        assert_eq!(other.first("tile", b"128 x 64".to_vec()), b"128 x 64");
        assert_eq!(one.first("tile", b"64 x 128".to_vec()), b"128 x 64");
        // Where nothing can be kept each has its own.
        std::fs::write(dir.path().join("file"), b"").expect("written");
        assert_eq!(Kept::new(&dir.path().join("file")).first("tile", b"1".to_vec()), b"1");
    }

    #[test]
    fn a_folder_that_cannot_be_written_only_costs_time() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("file"), b"").expect("written");
        let kept = Kept::new(&dir.path().join("file"));
        kept.write("a", b"code");
        assert_eq!(kept.read("a"), None);
    }
}
