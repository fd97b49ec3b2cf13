"""A kernel `k` that does nothing, to ask the driver about launches.

Its PTX, which later GPUs take, costs the first call 80 ms: the driver loads its compiler. Hopper
gets the cubin that ptxas 13.5 -arch=sm_90 makes of that PTX.
"""

from __future__ import annotations

import base64
import zlib

PTX = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry k() { ret; }
\0"""
"""PTX for any GPU from Hopper on."""
_CUBIN = (
    "c-rk%L2J}N6n@!c+jP6Iv0fJRP(fh@iAxJwJS}4N;zH3|FClfaP3dm3Bynk|U{=9j;K8H#8$5WD9{dIV1W)2Y`~l"
    "TCN#3NB$z;V+FVYVt-^`o$&6{~U`{w!P!}~Q!T3>_=HTVcKIDytcMu+YCHuPWv>g3x52|)L4Kkx!`hx90iV}=dib"
    "_NHaJ5znn8M>ec)<K}}=LYQhw&_`e;=r?f%bSu;7xaO(^K{o3dgj;yGBGL{%%X*?^28jCc0F@qr=yAI25t~eaL#r"
    "7z;uExiTG#ylS9(eJsw+Q-5m~nE9h37-Y}f0k^A>I`$pz(bPaQ~XZmNFp8dZ`&>CqnES2n!NV~#}73Ab@t-fuP{N"
    "JVPC?)&n)V^4<e<y84W8z8~{Yd?nOa3vzRi>YS#Cw)-t2v9J4yf@g>ZoZq^SM!VXpE&O^wUHY8QxT30ne*k$oi>$"
    "h3Vf`(mcppq+N<ZxvYSe*l#JIGJ8z;7xGW!W8{1J{}u9ePlFeSQVhw@kp%wIf__M6A{oB5;6Zqt#*E{aG90y_9Wv"
    "toV0?~qoF$~R{*=)}{v<9XIhHH**Cerk*I&e%z@vl4Bd%`HdecU>1#2ewT05Da7yo)j6JEcChoUuD=H3O0JE-q*_"
    "5cN|jDAU=f0OO06#unA&&H>Dc!f4T{s+03CmH?t{H<Y5N;O$2CQL@3Nbqi|qB~HZ`xNDPkG8uNdX2dpqWsafOKXV"
    "ZwWT7f%sx)5tBWoIe?Wn5VNPCn@cXRN(fm-Ry5ETd1)K"
)


def cubin() -> bytes:
    """The module's ELF file for Hopper."""
    return zlib.decompress(base64.b85decode(_CUBIN))
