//! Where CUDA's libraries are found: beside the program, where the loader looks, in CUDA's own folders and in pip's.
//!
//! # Why
//! cudarc opens a library by its plain name, and the loader answers with one of that name that is open already before it
//! looks at files. So what lies elsewhere is opened here by its path, and stays open. The run-time compiler opens a part
//! of itself in the same way, so that one is opened with it.
//!
//! A driver loads code of its own CUDA version and of earlier ones. So the newest library that is not newer than the
//! driver, by its first number, is taken; both 12 and 13 will do.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A folder that is searched first; for tests and unusual machines.
const VARIABLE: &str = "ANTIPHON_CUDA_LIBRARIES";
/// Versions of CUDA that work, newest first.
const MAJORS: [u32; 2] = [13, 12];
/// The oldest driver, as it numbers the CUDA that it knows: 12.4, which came with driver 550.
const LEAST_DRIVER: i32 = 12_040;

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// `libnvrtc`, the run-time compiler.
    Compiler,
    /// `libcublasLt`, large GEMMs.
    Blas,
}

impl Component {
    pub(super) fn stem(self) -> &'static str {
        match self {
            Component::Compiler => "nvrtc",
            Component::Blas => "cublasLt",
        }
    }

    /// The command that brings it, for CUDA `major`.
    fn remedy(self, major: u32) -> String {
        let package = match self {
            Component::Compiler => "nvidia-cuda-nvrtc",
            Component::Blas => "nvidia-cublas",
        };
        let suffix = if major >= 13 { String::new() } else { format!("-cu{major}") };
        format!("`pip install {package}{suffix}`")
    }
}

/// A library that is open: where it was found, its plain name where the loader found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Which.
    pub part: Component,
    /// Where.
    pub path: PathBuf,
}

/// Those that are open. They stay so: code of theirs may run on any thread until the process ends.
static OPEN: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// The driver's CUDA version, such as 13000.
///
/// # Errors
/// There is no driver, or one that is too old, in one line.
pub(super) fn driver() -> Result<i32, String> {
    // SAFETY: only tries to open a shared library.
    if !unsafe { sys::is_culib_present() } {
        return Err(
            "no GPU engine: the NVIDIA driver (libcuda.so.1) is not installed, or not passed into this container"
                .into(),
        );
    }
    let mut version = 0;
    // SAFETY: the driver is there, and `version` alive. It answers before it is initialised.
    let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("no GPU engine: the NVIDIA driver does not say its version: {code:?}"));
    }
    if version < LEAST_DRIVER {
        return Err(format!(
            "no GPU engine: the NVIDIA driver knows CUDA up to {}, {} is needed: install driver 550 or newer",
            number(version),
            number(LEAST_DRIVER)
        ));
    }
    Ok(version)
}

/// A call of the driver that not every driver has; `F` is a function pointer of its type. The driver is there.
pub(super) fn driver_call<F: Copy>(name: &[u8]) -> Option<F> {
    // SAFETY: the library stays open; that the type is right is the caller's promise.
    unsafe { sys::culib().get::<F>(name) }.ok().map(|call| *call)
}

/// `12.4` for 12040.
fn number(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Opens everything that the engine needs.
///
/// # Errors
/// What is missing and the command that brings it, in one line.
pub(super) fn open() -> Result<(), String> {
    let driver = driver()?;
    for part in [Component::Compiler, Component::Blas] {
        if !opened(part, Some(driver)) {
            let major = (driver / 1000) as u32;
            return Err(format!("no GPU engine: lib{} is not found: {}", part.stem(), part.remedy(major)));
        }
    }
    Ok(())
}

/// Opens the run-time compiler, which needs no driver. Whether it is there.
pub(super) fn open_compiler() -> bool {
    opened(Component::Compiler, driver().ok())
}

/// Whether kernels can be compiled here, with or without a device.
pub fn compiles() -> bool {
    open_compiler()
}

/// What is open, for people.
pub fn list() -> Vec<Opened> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn opened(part: Component, driver: Option<i32>) -> bool {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if open.iter().any(|known| known.part == part) {
        return true;
    }
    let most = driver.map_or(u32::MAX, |version| (version / 1000) as u32);
    let exe = std::env::current_exe().ok();
    let folders = folders(&|name| std::env::var_os(name), exe.as_deref());
    for major in MAJORS.into_iter().filter(|major| *major <= most) {
        let name = format!("lib{}.so.{major}", part.stem());
        if let Some(path) = folders.iter().find_map(|folder| open_in(folder, &name)) {
            tracing::debug!(library = %path.display(), "opened");
            open.push(Opened { part, path });
            return true;
        }
    }
    false
}

/// Opens `name` in `folder`, or where the loader looks; with it the parts of itself that it would not find.
fn open_in(folder: &Folder, name: &str) -> Option<PathBuf> {
    let path = match folder {
        Folder::Loader => PathBuf::from(name),
        Folder::At(folder) => folder.join(name),
    };
    if let Folder::At(folder) = folder {
        if !path.is_file() {
            return None;
        }
        let builtins = |name: &str| name.starts_with("libnvrtc-builtins.so.");
        if name.starts_with("libnvrtc.") {
            for part in
                entries(folder).into_iter().filter(|p| p.file_name().and_then(|n| n.to_str()).is_some_and(builtins))
            {
                keep(&part);
            }
        }
    }
    keep(&path).then_some(path)
}

/// Opens a library for as long as the process lives.
fn keep(path: &Path) -> bool {
    // SAFETY: NVIDIA's libraries do nothing but register themselves when they are opened.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// A place to look.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Folder {
    /// `LD_LIBRARY_PATH`, the cache of `ldconfig`, the system's folders.
    Loader,
    At(PathBuf),
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

/// Where libraries are looked for, in order. `variable`: the environment.
fn folders(variable: &dyn Fn(&str) -> Option<OsString>, exe: Option<&Path>) -> Vec<Folder> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut out: Vec<Folder> = path(VARIABLE).into_iter().map(Folder::At).collect();
    if let Some(beside) = exe.and_then(Path::parent) {
        out.extend([beside.to_owned(), beside.join("lib")].map(Folder::At));
    }
    out.push(Folder::Loader);
    // The toolkit, in the order in which its own tools look for it.
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path);
    let installed = entries(Path::new("/usr/local")).into_iter().rev();
    let installed = installed.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("cuda")));
    for root in toolkits.chain(installed).chain([PathBuf::from("/opt/cuda")]) {
        out.extend([root.join("lib64"), root.join("targets/x86_64-linux/lib")].map(Folder::At));
    }
    // Python environments: the active one, the user's, the system's.
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path);
    let user = path("HOME").map(|home| home.join(".local"));
    for root in environments.chain(user).chain(["/usr/local", "/usr"].map(PathBuf::from)) {
        out.push(Folder::At(root.join("lib")));
        for python in entries(&root.join("lib")) {
            if python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) {
                for site in ["site-packages", "dist-packages"] {
                    // nvidia/cu13/lib, nvidia/cuda_nvrtc/lib, nvidia/cublas/lib
                    out.extend(
                        entries(&python.join(site).join("nvidia")).into_iter().map(|p| Folder::At(p.join("lib"))),
                    );
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_pip_and_of_the_toolkit_are_searched_after_the_loaders() {
        let dir = tempfile::tempdir().expect("a folder");
        let site = dir.path().join("venv/lib/python3.12/site-packages/nvidia");
        for package in ["cu13", "cublas"] {
            std::fs::create_dir_all(site.join(package).join("lib")).expect("made");
        }
        let at = |path: &str| dir.path().join(path);
        let variable = |name: &str| match name {
            VARIABLE => Some(at("mine").into()),
            "CUDA_HOME" => Some(at("cuda").into()),
            "VIRTUAL_ENV" => Some(at("venv").into()),
            "CUDA_PATH" => Some(OsString::new()),
            _ => None,
        };
        let found = folders(&variable, Some(&at("bin/antiphon")));
        let place = |folder: &Folder| found.iter().position(|f| f == folder).expect("searched");
        let order = [
            Folder::At(at("mine")),
            Folder::At(at("bin")),
            Folder::Loader,
            Folder::At(at("cuda/lib64")),
            Folder::At(site.join("cu13/lib")),
        ];
        assert!(order.windows(2).all(|two| place(&two[0]) < place(&two[1])), "{found:?}");
        assert!(found.contains(&Folder::At(site.join("cublas/lib"))));
        assert!(!found.contains(&Folder::At("lib64".into())), "an empty variable is none");
    }

    #[test]
    fn a_missing_library_is_named_with_the_command_that_brings_it() {
        assert_eq!(Component::Compiler.remedy(13), "`pip install nvidia-cuda-nvrtc`");
        assert_eq!(Component::Blas.remedy(12), "`pip install nvidia-cublas-cu12`");
        assert_eq!(number(12_040), "12.4");
    }
}
