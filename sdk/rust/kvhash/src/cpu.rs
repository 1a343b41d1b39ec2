//! What the processor can do beyond what every one of its kind can; found out once, before a run of blocks.

#[cfg(target_arch = "x86_64")]
use crate::x86::{Sha, Wide};

/// The extensions that the hot path uses where they are there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpu {
    #[cfg(target_arch = "x86_64")]
    pub(crate) sha: Option<Sha>,
    #[cfg(target_arch = "x86_64")]
    pub(crate) wide: Option<Wide>,
}

impl Cpu {
    /// This processor.
    #[inline]
    pub(crate) fn detect() -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            sha: Sha::detect(),
            #[cfg(target_arch = "x86_64")]
            wide: Wide::detect(),
        }
    }

    /// One that has no extensions: what every processor does.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            sha: None,
            #[cfg(target_arch = "x86_64")]
            wide: None,
        }
    }
}
