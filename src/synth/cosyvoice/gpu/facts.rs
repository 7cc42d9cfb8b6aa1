//! What the driver says of a device before anybody opens it.

use cudarc::driver::result as cu;
use cudarc::driver::sys;

/// One device, as far as it is known without a context.
#[derive(Clone, Debug)]
pub struct Facts {
    device: sys::CUdevice,
    /// What it calls itself.
    pub name: String,
    /// Compute capability times ten: 86 for 8.6.
    pub capability: u32,
    /// Bytes of memory in all.
    pub memory: u64,
}

impl Facts {
    /// Of device `ordinal`. The driver is there.
    ///
    /// # Errors
    /// The driver does not answer, in one line.
    pub fn of(ordinal: u32) -> Result<Self, String> {
        use sys::CUdevice_attribute_enum as Of;
        let failed = |e: cudarc::driver::DriverError| format!("no GPU engine: device {ordinal} does not answer: {e}");
        cu::init().map_err(failed)?;
        let device = cu::device::get(ordinal as i32).map_err(failed)?;
        // SAFETY: the device is one that there is.
        let memory = unsafe { cu::device::total_mem(device) }.map_err(failed)? as u64;
        let name = cu::device::get_name(device).map_err(failed)?;
        let this = Self { device, name, capability: 0, memory };
        let major = this.attribute(Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = this.attribute(Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Self { capability: (10 * major + minor).max(0) as u32, ..this })
    }

    /// One of the numbers that the driver has of it.
    pub(super) fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32, String> {
        // SAFETY: the device is one that there is.
        unsafe { cu::device::get_attribute(self.device, which) }
            .map_err(|e| format!("no GPU engine: {} does not say what it has: {e}", self.name))
    }
}
